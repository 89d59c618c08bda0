"""Input and output of pruning: the visual tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class VisualTokens:
    """The visual tokens of one prompt, passed to `Score.prune`.

    `V` visual tokens, `X` text tokens, `D` hidden size of the language model. Pruning takes place either before the
    language model (`Score.prunes` is 0) or inside it; fields of the other case are None.

    Attributes:
        keep: Number of visual tokens to keep, at least 1.
        feature: Input embeddings of the visual tokens, `[V, D]`; inside the language model, the hidden states at the
            input of the attention of the layer before the pruning.
        text: The same for the text tokens, `[X, D]`.
        image: Index of the image or video of each visual token, from 0, int64 `[V]`.
        salience: Attention that each visual token receives in the vision tower, float32 `[V]`: from the class token if
            there is one, otherwise the mean over all patches; mean over heads. Measured in the layer whose output the
            language model receives. None inside the language model.
        patch_key: Keys of that layer, heads concatenated, `[V, d_tower]`. If several patches form one token, this and
            the next fields are means over the patches. None inside the language model.
        head_key: Mean of these keys over heads, `[V, d_tower / heads]`.
        last_salience: Like `salience`, but for the tower's last layer and with one softmax over all heads together,
            scaled by the square root of `d_tower`.
        last_key: Like `patch_key`, but for the tower's last layer.
        attention: Attention from the last token of the prompt in the layer before the pruning, mean over heads,
            float32 `[V]`. None before the language model.
        key: Keys of that layer, heads concatenated, `[V, H d]`. None before the language model.
        text_key: The same for the text tokens, `[X, H d]`. None before the language model.
        output: Output of that layer, after the final norm of the language model, `[V, D]`. None before the language
            model.
        text_output: The same for the text tokens, `[X, D]`. None before the language model.
        follows: Which text tokens come after the last visual token, bool `[X]`. None before the language model.
    """

    keep: int
    feature: Tensor
    text: Tensor
    image: Tensor
    salience: Tensor | None = None
    patch_key: Tensor | None = None
    head_key: Tensor | None = None
    last_salience: Tensor | None = None
    last_key: Tensor | None = None
    attention: Tensor | None = None
    key: Tensor | None = None
    text_key: Tensor | None = None
    output: Tensor | None = None
    text_output: Tensor | None = None
    follows: Tensor | None = None


@dataclass(frozen=True)
class Pruned:
    """Result of pruning visual tokens.

    Attributes:
        keep: Which tokens to keep, bool `[V]`; exactly `VisualTokens.keep` are true.
        feature: Replacement for `VisualTokens.feature`, `[V, D]`; None leaves it unchanged.
    """

    keep: Tensor
    feature: Tensor | None = None
