"""What the predictor of decode shares learns from the counts that come with releases."""

from eldr.router.counters import Counters, Gauges
from eldr.router.model import ModelRouting
from eldr.router.signatures import ReadSignature
from eldr.routing.contract import Booking
from eldr.routing.predictor import PLAIN, Lesson


class DecodeLessons:
    """Hands usable counts to a model's predictor; the fate of all is counted by name, its error is a gauge."""

    def __init__(self, counters: Counters, gauges: Gauges) -> None:
        self._counters = counters
        self._gauges = gauges

    def take(self, routing: ModelRouting, booking: Booking, decoded: ReadSignature) -> None:
        """Learns from the booking's prompt and what was decoded of it."""
        self._counters.add("eldr_decode_counts_total", result=self._learn(routing, booking, decoded))

    def _learn(self, routing: ModelRouting, booking: Booking, decoded: ReadSignature) -> str:
        if decoded.signature is None:
            return decoded.problem
        if booking.signature is None:
            return "no-signature"
        counts, predictor = decoded.signature, routing.predictor
        lesson = predictor.observe(booking.signature, counts.counts, counts.covered_tokens)
        if lesson is Lesson.LEARNED:
            self._gauges.set("eldr_predictor_error", predictor.error, form="in-force", model=routing.name)
            self._gauges.set(
                "eldr_predictor_error", predictor.errors[PLAIN], form="plain", model=routing.name
            )
        return lesson.value
