"""From a prompt's counts to the shares of decode steps that will touch each expert, learned online.

Plain is q = min(1, counts / tokens). The prediction is m * (counts + k * g) / (tokens + k): g the global share of
prefill tokens per layer and expert, k a number of pseudo-tokens, m the ratio of decode to prefill picks per layer
and expert, shrunk to 1. Which of the forms is used is decided by their errors on requests that they had not
learned from yet, and plain stays until another has been clearly better.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from eldr.signature.expert_signature import ExpertSignature

Floats32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to predict: pseudo-tokens of the global share, and whether the ratios apply."""

    pseudo_tokens: float
    ratios: bool


PLAIN = Form(0.0, False)
FORMS = (PLAIN, *(Form(k, ratios) for k in (0.0, 8.0, 32.0) for ratios in (False, True) if k or ratios))


class Lesson(StrEnum):
    """What became of a finished request."""

    LEARNED = "learned"
    SHORT = "short"
    """Too few decoded tokens to tell shares."""
    EMPTY = "empty"
    """No prompt token is covered, or no pick was counted."""
    OTHER_SHAPE = "other-shape"
    """The counts have another shape than the signature."""
    NOT_COUNTS = "not-counts"
    """Negative or not finite."""


class Predictor:
    """Global share, ratios and the error of each form; forgets slowly.

    `publish_every` requests the form in force and its tables are renewed, so that predictions between two
    requests stay comparable. A form replaces plain once at least `trusted_after` requests were observed and its
    mean squared error was below `margin` of plain's.
    """

    def __init__(
        self,
        forgetting: float = 0.999,
        trusted_after: int = 100,
        publish_every: int = 64,
        margin: float = 0.95,
        least_decode_tokens: int = 16,
    ) -> None:
        self._forgetting = forgetting
        self._trusted_after = trusted_after
        self._publish_every = publish_every
        self._margin = margin
        self._least_decode_tokens = least_decode_tokens
        self._model = ("", (0, 0))
        self._prefill = np.zeros(0, np.float32)
        self._decode = np.zeros(0, np.float32)
        self._weight = 0.0
        self._errors = dict.fromkeys(FORMS, 0.0)
        self._added = np.zeros(0, np.float32)
        self._ratio: Floats32 | None = None
        self.form = PLAIN
        self.observations = 0

    @property
    def error(self) -> float:
        """Root mean squared error of the form in force; see `errors`."""
        return self.errors[self.form]

    @property
    def errors(self) -> dict[Form, float]:
        """Root mean squared error of a share, per form, recent requests; 0 before the first."""
        return {
            form: (total / self._weight) ** 0.5 if self._weight else 0.0
            for form, total in self._errors.items()
        }

    def shares(self, signature: ExpertSignature) -> Floats32:
        """Probability per decode step that the request touches each expert, float32 [layers * experts]."""
        form = self.form
        if form is PLAIN or _model_of(signature) != self._model:
            return signature.shares().reshape(-1)
        return self._predict(form, signature, self._added, self._ratio)

    def observe(
        self, signature: ExpertSignature, decode_counts: npt.NDArray[np.integer], decode_tokens: int
    ) -> Lesson:
        """Learns from a finished request: picks [layers, experts] of its `decode_tokens` decoded tokens.

        What cannot be learned from changes nothing, and the answer says why. A signature of another model than
        that of the one before begins anew.
        """
        if decode_counts.shape != signature.shape:
            return Lesson.OTHER_SHAPE
        if decode_tokens < self._least_decode_tokens:
            return Lesson.SHORT
        truth = decode_counts.reshape(-1).astype(np.float32) / np.float32(decode_tokens)
        if not (truth.min() >= 0 and truth.max() < np.inf):
            return Lesson.NOT_COUNTS
        if signature.covered_tokens == 0 or not truth.any():
            return Lesson.EMPTY
        if _model_of(signature) != self._model:
            self._begin(signature)
        np.minimum(truth, np.float32(1.0), out=truth)
        keep = self._forgetting
        if self._weight > 0:
            share, ratio = self._tables()
            for form in FORMS:
                wrong = self._predict(form, signature, share * np.float32(form.pseudo_tokens), ratio) - truth
                self._errors[form] = keep * self._errors[form] + float(wrong @ wrong) / wrong.size
        self._weight = keep * self._weight + 1.0
        self._prefill = keep * self._prefill + signature.shares().reshape(-1)
        self._decode = keep * self._decode + truth
        self.observations += 1
        if self.observations % self._publish_every == 0 and self.observations >= self._trusted_after:
            self._publish()
        return Lesson.LEARNED

    def _begin(self, signature: ExpertSignature) -> None:
        self._model = _model_of(signature)
        self._prefill = np.zeros(signature.counts.size, np.float32)
        self._decode = np.zeros(signature.counts.size, np.float32)
        self._weight = 0.0
        self._errors = dict.fromkeys(FORMS, 0.0)
        self.form = PLAIN
        self.observations = 0

    def _tables(self) -> tuple[Floats32, Floats32]:
        share = self._prefill / np.float32(self._weight)
        # Shrunk to 1: 20 requests' worth of the mean share speak for equality.
        doubt = np.float32(20.0) * np.float32(share.mean())
        ratio = (self._decode + doubt) / (self._prefill + doubt)
        return share, np.clip(ratio, np.float32(0.25), np.float32(4.0))

    def _publish(self) -> None:
        best = min(FORMS, key=lambda form: self._errors[form])
        better = self._errors[best] < self._margin * self._errors[PLAIN]
        self.form = best if better else PLAIN
        share, self._ratio = self._tables()
        self._added = share * np.float32(self.form.pseudo_tokens)

    @staticmethod
    def _predict(form: Form, signature: ExpertSignature, added: Floats32, ratio: Floats32 | None) -> Floats32:
        out = signature.counts.reshape(-1).astype(np.float32)
        if form.pseudo_tokens:
            out += added
        out *= np.float32(1.0 / max(1.0, signature.covered_tokens + form.pseudo_tokens))
        if form.ratios and ratio is not None:
            out *= ratio
        return np.minimum(out, np.float32(1.0), out=out)


def _model_of(signature: ExpertSignature) -> tuple[str, tuple[int, int]]:
    return signature.fingerprint, signature.shape
