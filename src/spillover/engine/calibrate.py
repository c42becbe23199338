"""From the seconds of a few passes of two small models to the `Costs` of each part of a pass.

The large model's weights are several times what caches hold, the small model's products take next to nothing:
what a layer takes beside its products comes from the small one, and is taken off the large one's passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spillover.engine.estimate import Costs, Shape

ROWS = (1, 4, 16, 64)  # that decode, each after SHORT tokens
SHORT, LONG, COMPARED = 31, 287, 16  # COMPARED rows do so after LONG tokens too
PREFILL = 256  # tokens of a prefill, in sequences of SEQUENCE or as one
SEQUENCE = 32  # tokens of most sequences
FEW, MANY = 2, 8  # sequences of a training step
_LEAST = 0.2  # of a pass of the large model goes to its products


@dataclass(frozen=True)
class Passes:
    """Seconds of inference passes.

    ``start`` until the large model can begin; ``steps`` of its decode steps, by rows; ``long`` of one of
    `COMPARED` rows after `LONG` tokens; ``prefill`` and ``whole`` of `PREFILL` tokens, in many sequences or
    one; ``one`` and ``most`` of the small model's decode steps with the fewest and the most rows.
    """

    start: float
    steps: Mapping[int, float]
    long: float
    prefill: float
    whole: float
    one: float
    most: float

    def costs(self, large: Shape, small: Shape) -> Costs:
        """What explains them."""
        spread = large.layers * large.queries
        attention = max(0.0, self.long - self.steps[COMPARED]) / (COMPARED * (LONG - SHORT) * spread)
        further = PREFILL * (PREFILL - SEQUENCE) / 2  # positions that one sequence sees beyond many
        causal = max(0.0, self.whole - self.prefill) / (further * spread)
        product = self.prefill / PREFILL / large.weights
        more = ROWS[-1] - ROWS[0]
        beside = self.most - self.one - more * product * (small.weights + small.head)
        element = max(0.0, beside) / (more * small.layers * small.hidden)
        layer = self.one / small.layers
        rows = PREFILL // SEQUENCE
        rest = _Rest(large, layer, element)
        products = [(n, rest.product(self.steps[n], n, n, SHORT * attention)) for n in ROWS]
        products.append((PREFILL, rest.product(self.prefill, PREFILL, rows, SEQUENCE / 2 * causal)))
        return Costs(tuple(products), layer, element, attention, causal, 0.0, self.start / large.bytes)


@dataclass(frozen=True)
class Steps:
    """Seconds of training steps of one micro-batch, with one target a sequence unless said otherwise.

    ``start`` until the large model can begin; ``few`` and ``many`` of its steps with `FEW` and `MANY`
    sequences; ``whole`` with as many tokens in one sequence; ``learning`` where all tokens but the first are
    targets; ``small_few`` and ``small_many`` of the small model's.
    """

    start: float
    few: float
    many: float
    whole: float
    learning: float
    small_few: float
    small_many: float

    def costs(self, large: Shape, small: Shape) -> Costs:
        """What explains them."""
        few, many = FEW * SEQUENCE, MANY * SEQUENCE
        further = many * (many - SEQUENCE) / 2
        causal = max(0.0, self.whole - self.many) / (further * large.layers * large.queries)
        target = max(0.0, self.learning - self.many) / (MANY * (SEQUENCE - 2) * large.head)
        product = max(0.0, self.many - self.few) / (many - few) * small.weights / large.weights
        element = max(0.0, self.small_many - self.small_few - (many - few) * product)
        element /= (many - few) * small.layers * small.hidden
        layer = self.small_few / small.layers - few * (small.hidden * element + product / small.layers)
        rest = _Rest(large, max(0.0, layer), element)
        seen = SEQUENCE / 2 * causal
        products = (
            (few, rest.product(self.few, few, 0, seen)),
            (many, rest.product(self.many, many, 0, seen)),
        )
        return Costs(products, rest.layer, element, 0.0, causal, target, self.start / large.bytes)


@dataclass(frozen=True)
class _Rest:
    """What layers of a model take beside their products."""

    shape: Shape
    layer: float
    element: float

    def product(self, seconds: float, tokens: int, logits: int, attention: float) -> float:
        """Seconds a weight that a pass of `seconds` has left for its products."""
        shape = self.shape
        beside = self.layer + tokens * (shape.hidden * self.element + shape.queries * attention)
        # a hiccup of the small model must not explain a whole pass of the large one
        return max(_LEAST * seconds, seconds - shape.layers * beside) / (
            shape.weights + shape.head * logits / tokens
        )
