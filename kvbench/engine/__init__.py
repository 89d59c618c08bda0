"""The engine: transformers models that run on ragged caches, from prompt to answer.

Reading order:

layer, cache    K and V: dense during prefill, then packed with a separate length per (sequence, KV head)
attachment      kvbench's attention, installed in any model by hooks (`contract`: refusals; `attend`: packed layers)
observers       attention, queries and surprisal observed during a forward; `driver` calls them around each forward
showing, decide the view of a layer, and the decision from it: score, allocate, select, merge
evict           packs a prefill and runs later eviction steps (`eviction_state`: the state between them)
prefix          one prefill shared by many cells, each with its own compressed cache; `session`: `kvbench.attach`
decode          stop conditions, greedy decoding and batches of compressed caches (`draw`: sampling)
pool            continuous batching: ended rows make room for new responses (`refill`)

Beside this path: `reading` (sparse attention of readers), `codes` and `channels` (quantised and pruned entries),
`vision`, `encoding` and `pruning` (images and videos), `replay` (KVzip), `shared` and `integrity` (detection of changes
in place), `models`, `loading`, `gguf` and `quantization` (the model itself), `kernels` (Triton).
"""
