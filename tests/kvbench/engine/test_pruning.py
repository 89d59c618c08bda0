"""Pruned visual tokens are as good as removed, with the positions of the whole prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvbench
from kvbench.budget import Budget
from kvbench.engine.driver import engine, forward
from kvbench.engine.models import decoder_of
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.pruning import pruning_of
from kvbench.errors import UserError
from kvbench.plugin import Policy, Pruned, VisualTokens

from .test_vision import IMAGE, Family, build, turn

BEFORE = ("divprune", "cdpruner", "visionzip:contextual=0", "prumerge:neighbours=0:variant=paper")
FAMILIES = ("qwen2_vl", "qwen3_vl", "llava")


def pruned_prefix(
    family: Family, policy: Policy, ids: Tensor, mask: Tensor, pixels: Any, budget: str
) -> tuple[Any, Tensor, Tensor]:
    """The compressed cache, the logits of the prompt, and the columns that stay."""
    limit = Budget.parse(budget)
    prefix = Prefix(family.model, policy.needs, pruning_of(policy, limit))
    logits = prefix.extend(ids, mask, pixels)
    assert prefix.cache.pruned is not None
    stays = mask.bool() & ~prefix.cache.pruned
    (cache,) = prefix.compress([Compression(policy, limit, "context", 0)])
    return cache, logits, stays


def removed_run(family: Family, ids: Tensor, pixels: Any, stays: Tensor, more: Tensor) -> Tensor:
    """Logits of a prompt whose pruned tokens the language model never gets, and of more tokens.

    Embeddings are those that the stock model gives its decoder; no code of kvbench runs here.
    """
    model, seen = family.model, {}

    def catch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)

    handle = decoder_of(model).register_forward_pre_hook(catch, with_kwargs=True)
    given = dict(pixels)
    if hasattr(model.model, "get_rope_index"):
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    model(input_ids=ids, **given)
    handle.remove()
    position = seen.get("position_ids")
    if position is None:
        position = torch.arange(ids.shape[1])[None]
    cache = DynamicCache(config=decoder_of(model).config)
    out = decoder_of(model)(
        inputs_embeds=seen["inputs_embeds"][:, stays[0]],
        position_ids=position[..., stays[0]],
        past_key_values=cache,
    )
    first = model.lm_head(out.last_hidden_state)[:, -1]
    start = int(position.max()) + 1
    after = torch.arange(start, start + more.shape[1])
    after = after.expand(3, 1, -1) if position.dim() == 3 else after[None]
    out = decoder_of(model)(input_ids=more, position_ids=after, past_key_values=cache)
    return torch.cat([first, model.lm_head(out.last_hidden_state)[:, -1]])


@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
@pytest.mark.parametrize("policy", BEFORE)
@torch.no_grad()
def test_pruning_before_the_model_equals_removing_the_tokens(name: str, policy: str) -> None:
    family = build(name)
    ids, mask, pixels = turn(family, [0], images=2, seed=0)
    more = torch.randint(1, 110, (1, 3), generator=torch.Generator().manual_seed(1))
    with engine(family.model):
        cache, logits, stays = pruned_prefix(family, kvbench.policy(policy), ids, mask, pixels, "visual:5")
        assert int((stays & (ids == IMAGE)).sum()) == 5
        assert all(torch.equal(k[0, 0], stays[0]) for k in cache.kept() if k is not None)
        later = forward(family.model, cache, more)
    expected = removed_run(family, ids, pixels, stays, more)
    assert torch.allclose(torch.cat([logits, later]), expected, atol=2e-5)
    everything = removed_run(family, ids, pixels, torch.ones_like(stays), more)
    assert (everything - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("policy", ["fastv", "dart", "fastv:layer=1"])
@torch.no_grad()
def test_pruning_inside_the_model_hides_the_tokens_from_that_layer_on(name: str, policy: str) -> None:
    """Against a stock model whose attention masks the same columns in the later layers."""
    family, chosen = build(name), kvbench.policy(policy)
    ids, mask, pixels = turn(family, [0], images=2, seed=2)
    with engine(family.model):
        _, logits, stays = pruned_prefix(family, chosen, ids, mask, pixels, "visual:4")
    assert chosen.score is not None and chosen.score.prunes is not None
    handles = []
    for layer in decoder_of(family.model).layers[chosen.score.prunes :]:

        def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            n = ids.shape[1]
            seen = torch.ones(n, n, dtype=torch.bool).tril() & (stays[0] | torch.eye(n).bool())
            return args, {**kwargs, "attention_mask": seen[None, None]}

        handles.append(layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True))
    given = dict(pixels)
    if name != "llava":
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    expected = family.model(input_ids=ids, **given).logits[:, -1]
    for handle in handles:
        handle.remove()
    assert torch.allclose(logits, expected, atol=2e-5)
    assert not torch.allclose(logits, family.model(input_ids=ids, **given).logits[:, -1], atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_scores_are_shown_what_the_vision_tower_sees(name: str) -> None:
    """Salience and keys against the eager attention of the stock tower."""
    family, seen = build(name), []

    class Looks(type(kvbench.policy("visionzip").score)):  # type: ignore[misc]
        def prune(self, tokens: VisualTokens) -> Pruned:
            seen.append(tokens)
            return super().prune(tokens)

    policy = kvbench.policy("visionzip")
    object.__setattr__(policy, "score", Looks())
    ids, mask, pixels = turn(family, [0, 3], images=2, seed=3)
    with engine(family.model):
        pruned_prefix(family, policy, ids, mask, pixels, "visual:4")
    inner = family.model.model
    tower = inner.visual if hasattr(inner, "visual") else inner.vision_tower
    assert tower.config._attn_implementation == "sdpa"
    weights: list[Tensor] = []
    blocks = [m for m in tower.modules() if type(m).__name__.endswith("Attention")]
    before = tower.config._attn_implementation
    tower.set_attn_implementation("eager")
    handle = blocks[-1].register_forward_hook(lambda m, a, out: weights.append(out[1]))
    try:
        if name == "llava":
            inner.get_image_features(pixels["pixel_values"])
            found = weights[0][:, :, 0, 1:].mean(1).flatten()
            assert torch.allclose(torch.cat([s.salience for s in seen]), found, atol=1e-5)
    finally:
        handle.remove()
        tower.set_attn_implementation(before)
    assert [len(s.image) for s in seen] == [2 * family.tokens] * 2
    last = blocks[-1]
    heads = last.num_heads
    joint: list[tuple[Tensor, Tensor]] = []
    watch = [
        module.register_forward_hook(lambda m, a, out: joint.append(out))
        for module in ((last.qkv,) if hasattr(last, "qkv") else (last.q_proj, last.k_proj))
    ]
    if name == "llava":
        inner.get_image_features(pixels["pixel_values"])
        query, key = joint
        weights = (query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5).softmax(-1)[:, 0, 1:]
        assert torch.allclose(torch.cat([s.last_salience for s in seen]), weights.flatten(), atol=1e-5)
        keys = key[:, 1:].flatten(0, 1)
        assert torch.allclose(torch.cat([s.last_key for s in seen]), keys, atol=1e-5)
        mean = keys.view(len(keys), heads, -1).mean(1)
        assert torch.allclose(torch.cat([s.head_key for s in seen]), mean, atol=1e-5)
    for handle in watch:
        handle.remove()
    for shown in seen:
        assert shown.last_salience is not None and shown.last_salience.shape == shown.image.shape
        assert shown.keep == 4 and shown.patch_key is not None and shown.salience is not None
        assert shown.image.tolist() == [0] * family.tokens + [1] * family.tokens
        # Attention of an image sums to 1 over its patches; a class token keeps some for itself.
        total = shown.salience[shown.image == 0].sum() * (1 if name == "llava" else 4)
        assert 0.5 < total < 1 if name == "llava" else abs(total - 1) < 1e-4


@torch.no_grad()
def test_ordinary_budgets_spend_on_text_first() -> None:
    family = build("qwen2_vl")
    ids, mask, pixels = turn(family, [0], images=2, seed=4)
    text = int((ids != IMAGE).sum())
    with engine(family.model):
        for budget, visual in ((text + 3, 3), (text - 2, 0)):
            cache, _, _ = pruned_prefix(family, kvbench.policy("divprune"), ids, mask, pixels, str(budget))
            assert cache.visual_entries(0) == visual * 6
            assert cache.live_entries(0) == budget * 6


@torch.no_grad()
def test_attach_prunes_as_well() -> None:
    family = build("llava")
    ids, mask, pixels = turn(family, [0], images=1, seed=5)
    with kvbench.attach(family.model, "visionzip", "visual:4") as cache:
        family.model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2, **pixels)
        assert cache.visual_entries(0) == 4 * 6
    tower = family.model.model.vision_tower
    assert tower.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen2_5_vl", "does not support Qwen2.5-VL's windows; use divprune"),
        ("mistral3", "does not support Pixtral's joint sequence of all images; use divprune"),
        ("onevision", "produces 32 tokens but the prompt has 34: .* does not support this model; use divprune"),
        ("gemma4", "does not support Gemma 4's averaged patches; use divprune"),
    ],
)
def test_a_tower_whose_attention_is_not_that_of_the_tokens_is_refused(name: str, reason: str) -> None:
    family = build(name)
    ids, mask, pixels = turn(family, [0], images=2, seed=0)
    with engine(family.model), pytest.raises(UserError, match=reason):
        pruned_prefix(family, kvbench.policy("visionzip"), ids, mask, pixels, "visual:4")


@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_scores_inside_the_model_are_shown_what_the_layer_before_puts_out(name: str) -> None:
    family, seen = build(name), []

    class Looks(type(kvbench.policy("dart").score)):  # type: ignore[misc]
        def prune(self, tokens: VisualTokens) -> Pruned:
            seen.append(tokens)
            return super().prune(tokens)

    policy = kvbench.policy("dart")
    object.__setattr__(policy, "score", Looks())
    ids, mask, pixels = turn(family, [0], images=2, seed=3)
    with engine(family.model):
        pruned_prefix(family, policy, ids, mask, pixels, "visual:4")
    given = dict(pixels)
    if name != "llava":
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    states = family.model(input_ids=ids, output_hidden_states=True, **given).hidden_states
    own = ids[0] == IMAGE
    output = decoder_of(family.model).norm(states[policy.score.prunes])[0]  # type: ignore[union-attr]
    (shown,) = seen
    assert torch.allclose(shown.output, output[own], atol=1e-5)
    assert torch.allclose(shown.text_output, output[~own], atol=1e-5)
    last = own.nonzero().max()
    assert shown.follows.tolist() == [bool(i > last) for i in (~own).nonzero()]
    assert {True, False} == set(shown.follows.tolist())


@pytest.mark.parametrize("policy", ["fastv", "dart", "divprune", "snapkv:window=4", "h2o"])
@torch.no_grad()
def test_kept_takes_pixels_and_tells_what_a_run_keeps(policy: str) -> None:
    family, chosen = build("qwen2_vl"), kvbench.policy(policy)
    ids, mask, pixels = turn(family, [0, 3], images=2, seed=6)
    budget = Budget.parse("visual:4")
    with engine(family.model):
        prefix = Prefix(family.model, chosen.needs, pruning_of(chosen, budget))
        prefix.extend(ids, mask, pixels)
        (cache,) = prefix.compress([Compression(chosen, budget, "context", 0)])
    found = kvbench.kept(family.model, ids, chosen, "visual:4", mask, pixels=pixels)
    for layer, (mine, theirs) in enumerate(zip(found, cache.kept(), strict=True)):
        assert mine is not None and theirs is not None
        assert torch.equal(mine, theirs), layer
    blind = {**pixels, "pixel_values": torch.randn_like(pixels["pixel_values"])}
    other = kvbench.kept(family.model, ids, chosen, "visual:4", mask, pixels=blind)
    assert not all(torch.equal(a, b) for a, b in zip(found, other, strict=True))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="give pixels"):
        kvbench.kept(family.model, ids, chosen, "visual:4", mask)


@torch.no_grad()
def test_attached_layers_all_keep_the_tokens_that_were_not_pruned() -> None:
    """Also the first ones, which the model passes before it is known what is pruned."""
    family = build("qwen2_vl")
    ids, mask, pixels = turn(family, [0], images=2, seed=8)
    found = kvbench.kept(family.model, ids, "fastv", "visual:4", mask, pixels=pixels)
    assert all(layer is not None and torch.equal(layer, found[-1]) for layer in found)


@pytest.mark.parametrize("policy", ["fastv:layer=3", "dart:layer=9"])
def test_a_layer_that_the_model_does_not_have_is_refused(policy: str) -> None:
    family = build("qwen2_vl")  # three layers
    message = r"drops visual tokens from layer \d on, but the model has only 3 layers; use layer=2"
    with pytest.raises(UserError, match=message), kvbench.attach(family.model, policy, "visual:4"):
        pass
