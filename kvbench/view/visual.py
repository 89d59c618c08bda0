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
            make one token, both are means over them. None inside the language model.
        attention: Attention from the last token of the prompt in the layer before the pruning, mean
            over heads, float32 `[V]`. None before the language model.
        key: Keys of that layer, all heads side by side, `[V, H d]`. None before it.
        text_key: The same of the text tokens, `[X, H d]`. None before it.
    """

    keep: int
    feature: Tensor
    text: Tensor
    image: Tensor
    salience: Tensor | None = None
    patch_key: Tensor | None = None
    attention: Tensor | None = None
    key: Tensor | None = None
    text_key: Tensor | None = None


@dataclass(frozen=True)
class Pruned:
    """What is left of visual tokens.

    Attributes:
        keep: Which tokens stay, bool `[V]`; exactly `VisualTokens.keep` are true.
        feature: What the language model is given for them instead, `[V, D]`; None: nothing else.
    """

    keep: Tensor
    feature: Tensor | None = None
