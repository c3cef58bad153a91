"""Compares outputs with an ordinary server, and signatures with a reference. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.demo.client import Completion

TIE_LOGPROB = 1e-5
"""Two tokens whose log-probabilities lie this near may be told apart by the order of a float32 sum."""

CountArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """What the ordinary server answered, and at each token the gap of its two best log-probabilities."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """`ties` requests differ from the reference first at a tie, `different` (their ids) elsewhere."""

    checked: int
    ties: int
    different: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Every output was checked and equals the reference, ties aside."""
        return self.checked > 0 and not self.different


def compare_outputs(
    completions: Iterable[Completion], reference: Mapping[str, ReferenceOutput]
) -> OutputCheck:
    """Compares token by token up to the first difference, after which the texts are different ones.

    A request without a reference counts as different; one that failed is not checked, it is an error already.
    """
    checked = ties = 0
    different: list[str] = []
    for answer in completions:
        if answer.error:
            continue
        checked += 1
        expected = reference.get(answer.request_id)
        if expected is None:
            different.append(answer.request_id)
        elif answer.token_ids != expected.token_ids:
            if _differs_at_a_tie(answer.token_ids, expected):
                ties += 1
            else:
                different.append(answer.request_id)
    return OutputCheck(checked, ties, tuple(different))


def _differs_at_a_tie(token_ids: Sequence[int], expected: ReferenceOutput) -> bool:
    if len(token_ids) != len(expected.token_ids):
        return False
    pairs = zip(token_ids, expected.token_ids, strict=True)
    first = next(position for position, (mine, theirs) in enumerate(pairs) if mine != theirs)
    return expected.gaps[first] <= TIE_LOGPROB


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """`checked` signatures equal those of the prompts that were sent; `wrong` equal none that is left."""

    checked: int
    wrong: int

    @property
    def exact(self) -> bool:
        """Every signature that was seen is the reference's."""
        return self.checked > 0 and not self.wrong


def compare_signatures(expected: Iterable[CountArray], seen: Iterable[CountArray]) -> SignatureCheck:
    """Compares two collections of counts [layers, experts] as multisets, count for count.

    `expected` holds one entry for every request that was sent, so that a prompt sent three times is expected
    three times.
    """
    left = Counter(_key(counts) for counts in expected)
    checked = wrong = 0
    for counts in seen:
        key = _key(counts)
        if left[key] > 0:
            left[key] -= 1
            checked += 1
        else:
            wrong += 1
    return SignatureCheck(checked, wrong)


def _key(counts: CountArray) -> tuple[tuple[int, ...], bytes]:
    return counts.shape, np.ascontiguousarray(counts, dtype=np.uint32).tobytes()
