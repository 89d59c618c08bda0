"""Student: a frozen model whose full-attention layers are gated, or compressed between chunks.

No model code is copied. A hook on every attention module records its input, and the attention function that
transformers calls gates the logits. Without the hooks, the same model is the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvbench.engine.contract import check_keywords, family_of, logit_scale
from kvbench.engine.driver import check_supported
from kvbench.engine.implementations import StockAttention, register_attention, registered_name
from kvbench.engine.latent import is_latent
from kvbench.engine.models import (
    attention_modules,
    decoder_of,
    head_of,
    model_info,
    rotary_model,
)
from kvbench.engine.segments import ranks_of_tokens
from kvbench.engine.vision import mask_inputs, media_positions
from kvbench.errors import UserError
from kvbench.plugin import Blocks
from kvbench.training import losses
from kvbench.training.memory import TrainingMemory
from kvbench.training.method import Gates, Method

NAME = "kvbench-training"


@dataclass
class _Pass:
    """One forward pass of the student.

    Attributes:
        student: The running student.
        valid: Token positions, bool `[B, T]`; None for all.
        supervised: Positions whose next token is learned, bool `[B, T]`.
        outputs: Per layer: log beta for `distil`; the gates' inputs and labels for `regress`; queries and keys for
            `match`.
        memory: Memory of the layers; only for `compress`.
        scales: Factor of each layer's attention logits, see `LogitScale`; only for `match`.
    """

    student: Student
    valid: Tensor | None
    supervised: Tensor
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    memory: TrainingMemory | None = None
    scales: dict[int, float] = field(default_factory=dict)


def training_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    implementation: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply the student's attention: `query` `[B, H_q, T, d]` after RoPE, output `[B, T, H_q, d]`."""
    check_keywords(module, kwargs)
    hook_state = module.__dict__.get("_kvbench_training")
    if hook_state is not None:
        hook_state[0].check_shapes(module, key, value)
    scale = logit_scale(query, scaling, kwargs)
    if hook_state is not None and hook_state[1] is not None:
        student, forward_pass, layer, hidden_states = hook_state
        if forward_pass.memory is not None:
            output = forward_pass.memory.attend(layer, query, key, value, forward_pass.valid, scale)
            return output.transpose(1, 2).contiguous(), None
        if student.method.objective == "distil":
            return student.gated(forward_pass, layer, hidden_states, query, key, value, scale), None
        if student.method.objective == "match":
            forward_pass.outputs[layer], forward_pass.scales[layer] = (query, key), scale
        elif layer not in forward_pass.outputs:
            labels = losses.answer_logits(query, key, forward_pass.supervised, scale)
            forward_pass.outputs[layer] = (
                hidden_states,
                student.project(layer, hidden_states),
                labels,
            )
    stock = StockAttention(implementation, module, scaling, dropout, kwargs)
    return stock(query, key, value, attention_mask), None


register_attention(NAME, training_attention)


class Student(nn.Module):
    """Frozen model with gates; its forward pass returns the training loss.

    Args:
        model: A causal language model; its attention implementation is replaced.
        gates: The only trained parameters.
        method: Training method of the gates.
        settings: `checkpointing`, `kl`, `ntp`, `with_capacity`, `reverse_kl`, `capacity_weight`, `capacity_reduce`; and
            `capacity`, `gating` and `chunk` if the method has them.

    Raises:
        UserError: The gates or kvbench's attention do not fit this model.
    """

    def __init__(self, model: nn.Module, gates: nn.Module, method: Method, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.base = model.requires_grad_(False)
        self.gates = gates.float().requires_grad_(True)
        self.method = method
        self.gating = str(settings.get("gating", ""))
        self.gate_input = str(settings.get("input", ""))
        self.chunk = int(settings.get("chunk", 0))
        self.budget = int(settings.get("capacity", 0))
        self.weight = float(settings["capacity_weight"]) if settings["with_capacity"] else 0.0
        self.reduce = str(settings["capacity_reduce"])
        self.terms = losses.Terms(settings["kl"], settings["ntp"], settings["reverse_kl"])
        self._info = model_info(model)
        self._running: _Pass | None = None
        self._pixels: Mapping[str, Tensor] = {}
        layer_count = int(decoder_of(model).config.num_hidden_layers)
        if method.objective == "compress" and self._info.layers < layer_count:
            raise UserError(
                f"{method.name} cannot be trained for this model: only {self._info.layers} of its "
                f"{layer_count} layers have full attention"
            )
        check_supported(model)
        decoder_of(model).set_attn_implementation(registered_name(NAME, model))
        for layer, module in attention_modules(model):
            module.register_forward_pre_hook(
                lambda hooked, positional, keywords, layer_index=layer: self._entering(
                    layer_index, hooked, positional, keywords
                ),
                with_kwargs=True,
            )
            module.register_forward_hook(_leaving, always_call=True)
        with torch.no_grad():  # refuses attention that cannot be trained
            self._decode(torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device), None)
        self.checkpointed = (
            bool(settings["checkpointing"])
            and method.objective == "distil"
            and bool(getattr(model, "supports_gradient_checkpointing", False))
        )
        if self.checkpointed:
            # The method was renamed within transformers 5; the first argument is the same.
            method_names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            enable: Any = next(
                getattr(model, method_name) for method_name in method_names if hasattr(model, method_name)
            )
            enable({"use_reentrant": False})
        self.train()

    def train(self, mode: bool = True) -> Student:
        """Set the gates to training mode; the base model stays in inference mode (no dropout)."""
        super().train(mode)
        self.base.eval()
        if self.checkpointed:  # layers checkpoint only in training mode; their submodules stay in inference mode
            for submodule in self.base.modules():
                if getattr(submodule, "gradient_checkpointing", False):
                    submodule.training = mode
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
            valid: Token positions, bool `[B, T]`; None for all.
            pixels: Image inputs; see `kvbench.engine.vision`.

        Returns:
            `loss`, and without gradient its terms and, for `distil`, `retained`.
        """
        self._pixels = pixels
        if self.method.objective == "regress":
            return self._regress(input_ids, supervised, valid)
        if self.method.objective == "compress":
            return self._compress(input_ids, supervised, valid)
        if self.method.objective == "match":
            return self._match(input_ids, supervised, valid)
        return self._distil(input_ids, supervised, valid)

    def _distil(self, input_ids: Tensor, supervised: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        learned_mask = supervised[:, :-1]
        teacher_states = None
        if self.terms.kl:
            self._running = None  # without the hooks, the model is the teacher
            with torch.no_grad():
                teacher_states = self._decode(input_ids, valid)[:, :-1][learned_mask]
        self._running = forward_pass = _Pass(self, valid, supervised)
        student_states = self._decode(input_ids, valid)[:, :-1][learned_mask]
        log_beta = torch.stack([forward_pass.outputs[layer][0] for layer in sorted(forward_pass.outputs)], 1)
        total_loss = log_beta.new_zeros(())
        loss_parts: dict[str, Tensor] = {}
        if self.terms.kl or self.terms.ntp:
            reference_states = student_states.detach() if teacher_states is None else teacher_states
            quality_loss, kl_loss, ntp_loss = losses.quality(
                student_states,
                reference_states,
                input_ids[:, 1:][learned_mask],
                head_of(self.base),
                self.terms,
            )
            loss_parts |= {"kl": kl_loss} if self.terms.kl else {}
            loss_parts |= {"ntp": ntp_loss} if self.terms.ntp else {}
            total_loss = total_loss + quality_loss
        if self.weight:
            assert self.method.capacity is not None
            capacity_loss = self.method.capacity(
                log_beta, self.budget, scope=self.method.scope, reduce=self.reduce, valid=valid
            )
            loss_parts["capacity"] = capacity_loss.detach()
            total_loss = total_loss + self.weight * capacity_loss
        return {"loss": total_loss, **loss_parts, "retained": losses.retained(log_beta, valid)}

    def _regress(self, input_ids: Tensor, supervised: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        self._running = forward_pass = _Pass(self, valid, supervised)
        with torch.no_grad():
            self._decode(input_ids, valid)
        layer_outputs = [forward_pass.outputs[layer] for layer in sorted(forward_pass.outputs)]
        gates = cast("Gates", self.gates)
        predictions = torch.stack(
            [gates.score(layer, hidden_states, qkv=qkv) for layer, (hidden_states, qkv, _) in enumerate(layer_outputs)],
            1,
        )
        labels = torch.stack([labels for *_, labels in layer_outputs], 1)
        usable_mask = labels.isfinite()
        if valid is not None:
            usable_mask &= valid[:, None, None]
        fit_loss, smooth_loss = losses.regression(predictions, labels, usable_mask)
        total_loss = fit_loss + losses.SMOOTH * smooth_loss
        return {"loss": total_loss, "fit": fit_loss.detach(), "smooth": smooth_loss.detach()}

    def _compress(self, input_ids: Tensor, supervised: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        if self._pixels:
            raise UserError(f"{self.method.name} is trained on text only; use data without images")
        assert self.method.compress is not None
        memory = TrainingMemory(self.method.compress, self.gates, self.budget)
        token_mask = torch.ones_like(supervised) if valid is None else valid
        positions = ranks_of_tokens(token_mask)
        hidden_states, targets = [], []
        for chunk_start in range(0, input_ids.shape[1] - 1, self.chunk):
            chunk_slice = slice(chunk_start, chunk_start + self.chunk)
            learned_mask = supervised[:, :-1][:, chunk_slice]
            self._running = _Pass(self, token_mask[:, chunk_slice], learned_mask, memory=memory)
            with torch.set_grad_enabled(bool(learned_mask.any()) and torch.is_grad_enabled()):
                chunk_states = self._decode(input_ids[:, chunk_slice], None, positions[:, chunk_slice])
            hidden_states.append(chunk_states[:, : learned_mask.shape[1]][learned_mask])
            targets.append(input_ids[:, 1:][:, chunk_slice][learned_mask])
        student_states = torch.cat(hidden_states)
        total_loss, _, ntp_loss = losses.quality(
            student_states,
            student_states.detach(),
            torch.cat(targets),
            head_of(self.base),
            self.terms,
        )
        # A sequence within the budget is never compressed; the gates then get a gradient of 0.
        total_loss = total_loss + 0.0 * torch.stack([parameter.sum() for parameter in self.gates.parameters()]).sum()
        return {"loss": total_loss, "ntp": ntp_loss}

    def _match(self, input_ids: Tensor, supervised: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        self._running = forward_pass = _Pass(self, valid, supervised)
        with torch.no_grad():
            self._decode(input_ids, valid)
        gates, block_size = cast("Gates", self.gates), cast("Gates", self.gates).block
        lengths = [input_ids.shape[1]] * len(input_ids) if valid is None else valid.sum(-1).tolist()
        total_loss, query_count = torch.zeros((), device=input_ids.device), 0
        for layer, (query, key) in sorted(forward_pass.outputs.items()):
            for index, length in enumerate(lengths):  # blocks start at the first token of a sequence
                if length < 2 * block_size:
                    continue
                keys = key[index, :, -length:]
                queries = query[index, :, -length:].unflatten(0, (len(keys), -1))
                positions = torch.arange(length, device=input_ids.device)
                block_positions = positions[: length // block_size * block_size].unflatten(0, (-1, block_size))
                blocks = keys[:, : block_positions.numel()].unflatten(1, block_positions.shape)
                scale = forward_pass.scales[layer]
                target_shares, earlier_blocks = losses.block_shares(queries, keys, block_size, scale)
                block_view = Blocks(layer, queries, positions, blocks, block_positions, self._info)
                logits = gates.rate(block_view)
                total_loss = total_loss + losses.divergence(logits, target_shares, earlier_blocks)
                query_count += int(earlier_blocks.any(-1).sum())
        if not query_count:  # no sequence has a second block: a loss of 0 that is still differentiable
            total_loss, query_count = (
                sum((parameter.sum() * 0.0 for parameter in self.gates.parameters()), total_loss),
                1,
            )
        return {"loss": total_loss / query_count, "kl": total_loss.detach() / query_count}

    def check_shapes(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """Refuse attention whose keys and values the method cannot learn from.

        Raises:
            UserError: The attention has latents, or values of another size than its keys, and the method needs more
                than hidden states.
        """
        has_latents = is_latent(module)
        objective = self.method.objective
        reads_hidden = objective == "distil" and self.gate_input == "hidden"
        reads_keys = objective == "match" or key.shape == value.shape
        if reads_hidden or (reads_keys and not has_latents):
            return
        trait = "latents" if has_latents else "values of another size than its keys"
        raise UserError(
            f"{self.method.name} cannot be trained for {family_of(module)}, whose attention has {trait}; "
            "choose gates that read only hidden states"
        )

    def gated(
        self,
        forward_pass: _Pass,
        layer: int,
        hidden_states: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> Tensor:
        """Compute the retention-gated attention of a layer, `[B, T, H_q, d_v]`."""
        assert self.method.attention is not None
        log_beta = cast("Gates", self.gates).log_beta(layer, hidden_states, key, value)
        # The backward pass reruns a checkpointed layer; the first output has the gradient.
        forward_pass.outputs.setdefault(layer, (log_beta,))
        # All heads share an entry that is a latent, and with it the gate.
        log_beta = log_beta.expand(-1, key.shape[1], -1)
        output = self.method.attention(
            query, key, value, log_beta, scale=scale, gating=self.gating, valid=forward_pass.valid
        )
        return output.transpose(1, 2).contiguous()

    def project(self, layer: int, hidden_states: Tensor) -> Tensor:
        """Return a layer's queries, keys and values before RoPE, `[B, T, (H_q + 2 H) d]`."""
        assert self._info.project is not None
        return self._info.project(layer, hidden_states)

    def _decode(self, input_ids: Tensor, valid: Tensor | None, positions: Tensor | None = None) -> Tensor:
        kwargs: dict[str, Tensor] = {} if positions is None else {"position_ids": positions}
        if valid is not None:
            kwargs["attention_mask"] = valid.long()
            kwargs["position_ids"] = ranks_of_tokens(valid)
        decoder: Any = decoder_of(self.base)
        if self._pixels:  # the decoder's parent module inserts the images into the embeddings
            decoder = self.base.model
            kwargs |= {**self._pixels, **mask_inputs(self.base, input_ids)}
            if rotary_model(self.base) is not None:
                positions, _ = media_positions(self.base, input_ids, valid, self._pixels)
                kwargs["position_ids"] = positions
        last_states: Tensor = decoder(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
        return last_states

    def _entering(self, layer: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        module.__dict__["_kvbench_training"] = (self, self._running, layer, hidden_states)


def _leaving(module: nn.Module, args: Any, output: Any) -> None:
    module.__dict__["_kvbench_training"] = None
