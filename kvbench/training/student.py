"""The student: a frozen model whose full-attention layers are gated, or cut between chunks.

No model's forward is copied. A hook on every attention module records its input, and the attention
function that transformers calls gates the logits. Without the hooks, the same model is the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvbench.engine.contract import check_keywords
from kvbench.engine.driver import check_supported
from kvbench.engine.models import (
    attention_modules,
    decoder_of,
    head_of,
    model_info,
    rotary_model,
)
from kvbench.engine.vision import media_positions
from kvbench.errors import UserError
from kvbench.plugin import Blocks
from kvbench.training import losses
from kvbench.training.memory import Memory
from kvbench.training.method import Gates, Method

NAME = "kvbench-training"


@dataclass
class _Pass:
    """One forward pass of the student.

    Attributes:
        student: The student.
        valid: Which positions are tokens, bool `[B, T]`; None for all.
        supervised: Positions whose next token is learned, bool `[B, T]`.
        outputs: By layer: log beta for `distil`; the gates' inputs and their labels for `regress`;
            queries and keys for `match`.
        memory: What the layers hold; only for `compress`.
        scale: Factor of the attention logits.
    """

    student: Student
    valid: Tensor | None
    supervised: Tensor
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    memory: Memory | None = None
    scale: float = 1.0


def training_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: `query` `[B, H_q, T, d]` after RoPE, output `[B, T, H_q, d]`."""
    check_keywords(module, kwargs)
    hooked = module.__dict__.get("_kvbench_training")
    if hooked is not None:
        running, index, hidden = hooked
        student: Student = running.student
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if running.memory is not None:
            out = running.memory.attend(index, query, key, value, running.valid, scale)
            return out.transpose(1, 2).contiguous(), None
        if student.method.objective == "distil":
            return student.gated(running, index, hidden, query, key, value, scale), None
        if student.method.objective == "match":
            running.outputs[index], running.scale = (query, key), scale
        elif index not in running.outputs:
            labels = losses.answer_logits(query, key, running.supervised, scale)
            running.outputs[index] = hidden, student.project(index, hidden), labels
    plain: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return plain


AttentionInterface.register(NAME, training_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class Student(nn.Module):
    """A frozen model with gates; its forward returns the training loss.

    Args:
        model: A causal language model; its attention implementation is replaced.
        gates: The gates, which are the only trained parameters.
        method: Kind of the gates.
        settings: `checkpointing`, `kl`, `ntp`, `with_capacity`, `reverse_kl`, `capacity_weight`,
            `capacity_reduce`; and those of `capacity`, `gating` and `chunk` that the method has.

    Raises:
        UserError: The gates or kvbench's attention do not fit this model.
    """

    def __init__(
        self, model: nn.Module, gates: nn.Module, method: Method, settings: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.base = model.requires_grad_(False)
        self.gates = gates.float().requires_grad_(True)
        self.method = method
        self.gating = str(settings.get("gating", ""))
        self.chunk = int(settings.get("chunk", 0))
        self.budget = int(settings.get("capacity", 0))
        self.weight = float(settings["capacity_weight"]) if settings["with_capacity"] else 0.0
        self.reduce = str(settings["capacity_reduce"])
        self.terms = losses.Terms(settings["kl"], settings["ntp"], settings["reverse_kl"])
        self._info = model_info(model)
        self._running: _Pass | None = None
        self._pixels: Mapping[str, Tensor] = {}
        layers = int(decoder_of(model).config.num_hidden_layers)
        if method.objective == "compress" and self._info.layers < layers:
            raise UserError(
                f"{method.name} cannot be trained for this model: only {self._info.layers} of its "
                f"{layers} layers have full attention"
            )
        check_supported(model)
        decoder_of(model).set_attn_implementation(NAME)
        for index, module in attention_modules(model):
            module.register_forward_pre_hook(
                lambda m, a, k, i=index: self._entering(i, m, a, k), with_kwargs=True
            )
            module.register_forward_hook(_leaving, always_call=True)
        self.checkpointed = (
            bool(settings["checkpointing"])
            and method.objective == "distil"
            and bool(getattr(model, "supports_gradient_checkpointing", False))
        )
        if self.checkpointed:
            # The name changed within transformers 5; the first argument is the same.
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            enable: Any = next(getattr(model, n) for n in names if hasattr(model, n))
            enable({"use_reentrant": False})
        self.train()

    def train(self, mode: bool = True) -> Student:
        """Put the gates into training mode; the base model stays in inference mode (no dropout)."""
        super().train(mode)
        self.base.eval()
        if self.checkpointed:  # layers checkpoint only in training mode; their modules stay
            for module in self.base.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.training = mode
        return self

    def forward(
        self,
        input_ids: Tensor,
        supervised: Tensor,
        valid: Tensor | None = None,
        **pixels: Tensor,
    ) -> dict[str, Tensor]:
        """Compute the loss on a batch.

        Args:
            input_ids: `[B, T]`, padded on the left.
            supervised: Positions whose next token is learned, bool `[B, T]`.
            valid: Which positions are tokens, bool `[B, T]`; None for all.
            pixels: The images among the tokens; see `kvbench.engine.vision`.

        Returns:
            `loss`; without gradient, its parts and, for `distil`, `retained`.
        """
        self._pixels = pixels
        if self.method.objective == "regress":
            return self._regress(input_ids, supervised, valid)
        if self.method.objective == "compress":
            return self._compress(input_ids, supervised, valid)
        if self.method.objective == "match":
            return self._match(input_ids, supervised, valid)
        return self._distil(input_ids, supervised, valid)

    def _distil(self, ids: Tensor, supervised: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        rows = supervised[:, :-1]
        teacher = None
        if self.terms.kl:
            self._running = None  # without the hooks, the model is the teacher
            with torch.no_grad():
                teacher = self._decode(ids, valid)[:, :-1][rows]
        self._running = running = _Pass(self, valid, supervised)
        student = self._decode(ids, valid)[:, :-1][rows]
        log_beta = torch.stack([running.outputs[i][0] for i in sorted(running.outputs)], 1)
        loss = log_beta.new_zeros(())
        parts: dict[str, Tensor] = {}
        if self.terms.kl or self.terms.ntp:
            reference = student.detach() if teacher is None else teacher
            quality, kl, ntp = losses.quality(
                student, reference, ids[:, 1:][rows], head_of(self.base), self.terms
            )
            parts |= {"kl": kl} if self.terms.kl else {}
            parts |= {"ntp": ntp} if self.terms.ntp else {}
            loss = loss + quality
        if self.weight:
            assert self.method.capacity is not None
            capacity = self.method.capacity(
                log_beta, self.budget, scope=self.method.scope, reduce=self.reduce, valid=valid
            )
            parts["capacity"] = capacity.detach()
            loss = loss + self.weight * capacity
        return {"loss": loss, **parts, "retained": losses.retained(log_beta, valid)}

    def _regress(self, ids: Tensor, supervised: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        self._running = running = _Pass(self, valid, supervised)
        with torch.no_grad():
            self._decode(ids, valid)
        layers = [running.outputs[i] for i in sorted(running.outputs)]
        gates = cast("Gates", self.gates)
        predicted = torch.stack(
            [gates.score(i, hidden, qkv=qkv) for i, (hidden, qkv, _) in enumerate(layers)], 1
        )
        labels = torch.stack([labels for *_, labels in layers], 1)
        usable = labels.isfinite()
        if valid is not None:
            usable &= valid[:, None, None]
        fit, smooth = losses.regression(predicted, labels, usable)
        loss = fit + losses.SMOOTH * smooth
        return {"loss": loss, "fit": fit.detach(), "smooth": smooth.detach()}

    def _compress(self, ids: Tensor, supervised: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        if self._pixels:
            raise UserError(f"{self.method.name} learns from text alone; use data without images")
        assert self.method.compress is not None
        memory = Memory(self.method.compress, self.gates, self.budget)
        exists = torch.ones_like(supervised) if valid is None else valid
        position = (exists.long().cumsum(-1) - 1).clamp(min=0)
        hidden, target = [], []
        for start in range(0, ids.shape[1] - 1, self.chunk):
            part = slice(start, start + self.chunk)
            learned = supervised[:, :-1][:, part]
            self._running = _Pass(self, exists[:, part], learned, memory=memory)
            with torch.set_grad_enabled(bool(learned.any()) and torch.is_grad_enabled()):
                out = self._decode(ids[:, part], None, position[:, part])
            hidden.append(out[:, : learned.shape[1]][learned])
            target.append(ids[:, 1:][:, part][learned])
        student = torch.cat(hidden)
        loss, _, ntp = losses.quality(
            student, student.detach(), torch.cat(target), head_of(self.base), self.terms
        )
        # A sequence that fits the budget is never cut; the gates then get a gradient of 0.
        loss = loss + 0.0 * torch.stack([p.sum() for p in self.gates.parameters()]).sum()
        return {"loss": loss, "ntp": ntp}

    def _match(self, ids: Tensor, supervised: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        self._running = running = _Pass(self, valid, supervised)
        with torch.no_grad():
            self._decode(ids, valid)
        gates, size = cast("Gates", self.gates), cast("Gates", self.gates).block
        tokens = [ids.shape[1]] * len(ids) if valid is None else valid.sum(-1).tolist()
        total, queries = torch.zeros((), device=ids.device), 0
        for index, (query, key) in sorted(running.outputs.items()):
            for row, length in enumerate(tokens):  # blocks start at the first token of a sequence
                if length < 2 * size:
                    continue
                k = key[row, :, -length:]
                q = query[row, :, -length:].unflatten(0, (len(k), -1))
                position = torch.arange(length, device=ids.device)
                complete = position[: length // size * size].unflatten(0, (-1, size))
                blocks = k[:, : complete.numel()].unflatten(1, complete.shape)
                share, earlier = losses.block_shares(q, k, size, running.scale)
                shown = Blocks(index, q, position, blocks, complete, self._info)
                logits = gates.rate(shown)
                total = total + losses.divergence(logits, share, earlier)
                queries += int(earlier.any(-1).sum())
        if not queries:  # no sequence has a second block: a loss of 0 that still has a gradient
            total, queries = sum((p.sum() * 0.0 for p in self.gates.parameters()), total), 1
        return {"loss": total / queries, "kl": total.detach() / queries}

    def gated(
        self,
        running: _Pass,
        layer: int,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> Tensor:
        """Retention-gated attention of a layer, `[B, T, H_q, d]`."""
        assert self.method.attention is not None
        log_beta = cast("Gates", self.gates).log_beta(layer, hidden, key, value)
        # The backward pass runs a checkpointed layer again: the first output has the gradient.
        running.outputs.setdefault(layer, (log_beta,))
        out = self.method.attention(
            query, key, value, log_beta, scale=scale, gating=self.gating, valid=running.valid
        )
        return out.transpose(1, 2).contiguous()

    def project(self, layer: int, hidden: Tensor) -> Tensor:
        """Queries, keys and values of a layer before RoPE, `[B, T, (H_q + 2 H) d]`."""
        assert self._info.project is not None
        return self._info.project(layer, hidden)

    def _decode(self, ids: Tensor, valid: Tensor | None, position: Tensor | None = None) -> Tensor:
        kwargs: dict[str, Tensor] = {} if position is None else {"position_ids": position}
        if valid is not None:
            kwargs["attention_mask"] = valid.long()
            kwargs["position_ids"] = (valid.long().cumsum(-1) - 1).clamp(min=0)
        decoder: Any = decoder_of(self.base)
        if self._pixels:  # the module around the decoder puts the images among the embeddings
            decoder = self.base.model
            kwargs |= self._pixels
            if rotary_model(self.base) is not None:
                position, _ = media_positions(self.base, ids, valid, self._pixels)
                kwargs["position_ids"] = position
        out: Tensor = decoder(input_ids=ids, use_cache=False, **kwargs).last_hidden_state
        return out

    def _entering(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        running = self._running
        module.__dict__["_kvbench_training"] = running and (running, index, hidden)


def _leaving(module: nn.Module, args: Any, out: Any) -> None:
    module.__dict__["_kvbench_training"] = None
