"""Head profiles: how much of a model's retrieval every KV head does, measured once and kept.

`needles` finds the needle in a prompt, `measure` watches the full cache while the model answers,
`files` keeps the profiles and finds the one of a model, `command` is `kvbench profile heads`,
`ship` makes those of the reference model, and `allocators` is what a policy's allocator builds on.
"""
