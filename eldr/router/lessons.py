"""What the predictor of decode shares learns from the counts that come with releases."""

from eldr.router.counters import Counters, Gauges
from eldr.router.signatures import ReadSignature
from eldr.routing.contract import Booking
from eldr.routing.predictor import PLAIN, Lesson, Predictor


class DecodeLessons:
    """Hands usable counts to the predictor; the fate of all of them is counted by name, its error is a gauge."""

    def __init__(self, predictor: Predictor, counters: Counters, gauges: Gauges) -> None:
        self._predictor = predictor
        self._counters = counters
        self._gauges = gauges

    def take(self, booking: Booking, decoded: ReadSignature) -> None:
        """Learns from the booking's prompt and what was decoded of it."""
        self._counters.add("eldr_decode_counts_total", result=self._learn(booking, decoded))

    def _learn(self, booking: Booking, decoded: ReadSignature) -> str:
        if decoded.signature is None:
            return decoded.problem
        if booking.signature is None:
            return "no-signature"
        counts = decoded.signature
        lesson = self._predictor.observe(booking.signature, counts.counts, counts.covered_tokens)
        if lesson is Lesson.LEARNED:
            self._gauges.set("eldr_predictor_error", self._predictor.error, form="in-force")
            self._gauges.set("eldr_predictor_error", self._predictor.errors[PLAIN], form="plain")
        return lesson.value
