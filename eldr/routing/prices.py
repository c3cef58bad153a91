"""What placing a request costs on each decoder, as far as it does not depend on the request."""

import operator

import numpy as np
import numpy.typing as npt

from eldr.routing.fleet_table import FleetTable, Floats32
from eldr.routing.step_time import Curve, StepTimes

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Prices:
    """Of every row of a fleet table, float64 [decoders]; brought up to date by `refresh`.

    load: requests in flight. union: share of the experts. step_s: step time now. next_s: step time with one
    request more that adds no union and no KV. per_growth_s, per_kv_s: step time per share of union, per KV
    token. least_s: the least that a request adds. growth_scale: growth of the union over `survival . q`.
    open: bool [decoders], takes work, is not broken and within the load bound. broken: as in the table.
    scale_s: the mean step time. more: load + 1. before: load * (step_s / scale_s)^power, -inf where not open.
    power: `most_power` where the open decoders' mean load is at least `power_load` (or that is 0), below in
    proportion, at least 1.

    A decoder that has never reported counts as the mean of those that have, plus the router's own bookings
    there: neither shunned nor flooded (case 3.7).
    """

    def __init__(
        self,
        table: FleetTable,
        step_times: StepTimes,
        max_load_ratio: float,
        most_power: float,
        power_load: float,
    ) -> None:
        self._table = table
        self._step_times = step_times
        self._max_load_ratio = max_load_ratio
        self._most_power = max(1.0, most_power)
        self._power_load = power_load
        self.power = self._most_power
        self._version = -1
        self._largest = 0
        self._curves: tuple[Curve, ...] = ()
        self.growth_scale: Floats = np.zeros(0)
        self.load: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.union: Floats = np.zeros(0)
        self.step_s = self.next_s = self.per_growth_s = self.per_kv_s = self.least_s = np.zeros(0)
        self.open = self.broken = np.zeros(0, np.bool_)
        self.any_broken = False
        self.scale_s = 1.0
        self.more: Floats = np.zeros(0)
        self.before: Floats = np.zeros(0)

    def refresh(self) -> bool:
        """Renews the prices where the table or a model changed; True where they did."""
        table = self._table
        fresh = table.version == self._version
        if not fresh:
            self._largest = 2 * int(table.in_flight.max()) + 1
        curves = tuple([self._step_times.model(group).curve(self._largest) for group in table.groups])
        if fresh and all(map(operator.is_, curves, self._curves)):
            return False
        self._version, self._curves = table.version, curves
        # Copies, since candidates are made of them later.
        self.load, self.union, self.broken = table.in_flight.copy(), table.union.copy(), table.broken.copy()
        self.growth_scale = np.full(len(self.load), 1.0 / max(1, table.survival.shape[1]))
        if table.silent.any() and not table.silent.all():
            self._take_silent_for_typical()
        if len(curves) == 1:
            rows = slice(None)
            self._price(curves[0], rows, next(iter(table.groups)))
        else:
            self.step_s, self.next_s, self.per_growth_s, self.per_kv_s, self.least_s = np.empty(
                (5, len(self.load))
            )
            for curve, (group, rows_of) in zip(curves, table.groups.items(), strict=True):
                self._price(curve, rows_of, group)
        self.any_broken = bool(self.broken.any())
        self.open = self.within_load(table.able & ~self.broken)
        self.scale_s = float(self.step_s.mean())
        self.power = self._power_now()
        self.more = self.load.astype(np.float64) + 1.0
        powered: Floats = np.power(self.step_s / self.scale_s, self.power)
        before: Floats = np.where(self.open, (self.more - 1.0) * powered, -np.inf)
        self.before = before
        return True

    def _power_now(self) -> float:
        able = np.count_nonzero(self.open)
        if self._power_load == 0 or able == 0:
            return self._most_power
        mean = float(self.load @ self.open) / able
        return max(1.0, self._most_power * min(1.0, mean / self._power_load))

    def cost(self, after_s: Floats) -> Floats:
        """Growth of n * T^power over scale_s^power, +inf where not open, float64 [decoders]."""
        out = after_s * (1.0 / self.scale_s)
        if self.power != 1.0:
            np.power(out, self.power, out=out)
        out *= self.more
        out -= self.before
        return out

    def within_load(self, among: Mask) -> Mask:
        """Those that may take one more request: at most `max_load_ratio` times the mean, or two more than it.

        One that has never reported begins slowly: half the mean.
        """
        ratio, count = self._max_load_ratio, np.count_nonzero(among)
        if ratio == 0 or count == 0:
            return among
        mean = float(self.load @ among) / float(count)
        within: Mask = among & (self.load + 1 <= max(ratio * mean, mean + 2))
        silent = self._table.silent
        if silent.any() and not silent.all():
            within &= ~silent | (self._table.in_flight < max(2.0, mean / 2))
        return within if within.any() else among

    def after(self, q: Floats32, prompt_tokens: int) -> tuple[Floats, Floats]:
        """Growth of the union and step time with a request of these shares, float64 [decoders] each."""
        growth: Floats = (self._table.survival @ q) * self.growth_scale
        after_s = self.per_growth_s * growth
        after_s += self.next_s
        if prompt_tokens and self.per_kv_s.any():
            after_s += self.per_kv_s * prompt_tokens
        return growth, np.maximum(after_s, self.least_s, out=after_s)

    def _price(self, curve: Curve, rows: "slice | npt.NDArray[np.int64]", group: str) -> None:
        model, table = self._step_times.model(group), self._table
        load, union, kv = self.load[rows], self.union[rows], table.kv_tokens[rows]
        speed = np.ones(len(load))
        if model.uneven:
            views = table.views if isinstance(rows, slice) else [table.views[row] for row in rows]
            speed = np.array([model.speed(view.worker_id) for view in views])
        more = load + 1
        union_s, kv_s = curve.union_s[more] * speed, curve.kv_s[more] * speed
        step_s = speed * (curve.load_s[load] + curve.union_s[load] * union + curve.kv_s[load] * kv)
        next_s = speed * curve.load_s[more] + union_s * union + kv_s * kv
        least_s = step_s + speed * curve.least_added_s
        found = (step_s, next_s, union_s, kv_s, least_s)
        if isinstance(rows, slice):
            self.step_s, self.next_s, self.per_growth_s, self.per_kv_s, self.least_s = found
            return
        for kept, part in zip(
            (self.step_s, self.next_s, self.per_growth_s, self.per_kv_s, self.least_s), found, strict=True
        ):
            kept[rows] = part

    def _take_silent_for_typical(self) -> None:
        table, silent = self._table, self._table.silent
        reported = [view for view in table.views if view.state is not None]
        mean = sum(view.in_flight - len(view.unreported) for view in reported) / len(reported)
        typical = float(table.union[~silent].mean())
        self.load = table.in_flight + np.where(silent, round(mean), 0)
        self.union = np.where(silent, 1.0 - (1.0 - table.union) * (1.0 - typical), table.union)
        self.growth_scale = np.where(silent, (1.0 - typical) * self.growth_scale, self.growth_scale)
