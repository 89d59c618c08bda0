"""Head profiles: how much each KV head contributes to a model's retrieval, measured once.

`needles` locates the needle in a prompt, `needle_attention` measures the attention to it while the model answers,
`ablation` measures the loss without heads, `files` stores and finds profiles, `command` implements
`kvbench profile heads`, `ship` builds the shipped profiles, and `allocators` is the base of allocators that use a
profile. `queries` summarises a model's queries (Q-filters, mean and covariance), and `summaries` stores and finds the
results.
"""
