"""Head profiles: how much of a model's retrieval every KV head does, measured once and kept.

`needles` finds the needle in a prompt, `measure` lets the model answer and watches its attention,
`ablation` measures what answers lose without heads, `files` stores and finds profiles, `command` is
`kvbench profile heads`, `ship` makes the profile of the reference model, and `allocators` is the
base of the policies' allocators that read a profile.

`queries` summarises the queries of a model (Q-filters, and their mean and covariance), and
`summaries` stores and finds what it made.
"""
