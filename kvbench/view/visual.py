"""What a score that prunes is shown of the visual tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class VisualTokens:
    """The visual tokens of one prompt, as a score with `Score.prunes` is shown them.

    `V` visual tokens, `X` text tokens, `D` hidden size of the language model.

    Attributes:
        keep: How many visual tokens stay, at least 1.
        feature: What the language model is given for them, `[V, D]`; inside the language model, the
            hidden states that enter the attention of the layer before the pruning.
        text: The same of the text tokens, `[X, D]`.
        image: Number of the image or video of each visual token, from 0, int64 `[V]`.
        salience: Attention that each receives in the vision tower, float32 `[V]`: from the class
            token if there is one, otherwise the mean over all patches; mean over heads. It is of
            the layer whose output the language model is given. None inside the language model.
        patch_key: Keys of that layer, all heads side by side, `[V, d_tower]`. Where several patches
            make one token, these and the fields after them are means over the patches. None inside
            the language model.
        head_key: The mean of these keys over heads, `[V, d_tower / heads]`.
        last_salience: As `salience`, but of the tower's last layer, and of one softmax over all
            heads together, scaled by the square root of `d_tower`.
        last_key: As `patch_key`, but of the tower's last layer.
        attention: Attention from the last token of the prompt in the layer before the pruning, mean
            over heads, float32 `[V]`. None before the language model.
        key: Keys of that layer, all heads side by side, `[V, H d]`. None before it.
        text_key: The same of the text tokens, `[X, H d]`. None before it.
        output: What that layer puts out, after the final norm of the language model, `[V, D]`. None
            before it.
        text_output: The same of the text tokens, `[X, D]`. None before it.
        follows: Which text tokens come after the last visual token, bool `[X]`. None before it.
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
    """What is left of visual tokens.

    Attributes:
        keep: Which tokens stay, bool `[V]`; exactly `VisualTokens.keep` are true.
        feature: What the language model is given for them instead, `[V, D]`; None: nothing else.
    """

    keep: Tensor
    feature: Tensor | None = None
