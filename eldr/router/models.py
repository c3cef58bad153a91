"""The models that one router serves side by side, each with a fleet, a policy and a profile of its own."""

from collections.abc import Callable, Mapping

from eldr.calibration.profile import Profile
from eldr.router.errors import RequestError, UnknownModelError
from eldr.router.fleet import Fleet, FleetMismatchError
from eldr.router.model import ModelRouting
from eldr.router.settings import RouterSettings
from eldr.routing.contract import PolicyError
from eldr.routing.predictor import Predictor
from eldr.routing.registry import POLICIES
from eldr.rpc.worker_info import WorkerInfo

MAX_MODELS = 64


class Models:
    """By served name; a name stands for one geometry, a profile is found by the geometry's fingerprint.

    A model comes with its first worker and keeps what it has learned when the last one leaves, until another
    geometry takes its name. While there is none, questions go to one without a name: what is set there, every
    model begins with. Raises PolicyError, ProfileError.
    """

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        profile: Profile | None = None,
        predictor: Callable[[], Predictor] = Predictor,
    ) -> None:
        self._fleet = fleet
        self._seed = settings.seed
        self._predictor = predictor
        policy = (settings.policy, settings.policy_options)
        self._nameless = ModelRouting("", None, policy, profile, self._seed, predictor())
        self._profiles = {} if profile is None else {profile.fingerprint: profile}
        self._by_name: dict[str, ModelRouting] = {}

    def all(self) -> list[ModelRouting]:
        """Every model, the one without a name where there is no other."""
        return list(self._by_name.values()) or [self._nameless]

    def find(self, name: str) -> ModelRouting:
        """The model of a request; a request may leave the name out where there is but one.

        Raises UnknownModelError, RequestError.
        """
        if not self._by_name:
            return self._nameless
        if name in self._by_name:
            return self._by_name[name]
        served = ", ".join(sorted(self._by_name))
        if name:
            raise UnknownModelError(f"model {name!r} is not served; served: {served}")
        if len(self._by_name) > 1:
            raise RequestError(f"model must be named, since several are served: {served}")
        return next(iter(self._by_name.values()))

    def of(self, info: WorkerInfo) -> ModelRouting:
        """The model of a member."""
        return self._by_name[info.served_model]

    def require_room(self, info: WorkerInfo) -> None:
        """Raises ProfileMismatchError or FleetMismatchError where a worker's model cannot be served."""
        known = self._by_name.get(info.served_model)
        if known is not None and known.profile is not None:
            known.profile.require_geometry(info.geometry)
        elif info.geometry.fingerprint in self._profiles:
            self._profiles[info.geometry.fingerprint].require_geometry(info.geometry)
        elif POLICIES[(known or self._nameless).policy[0]].needs_profile:
            for profile in self._profiles.values():
                profile.require_geometry(info.geometry)
        if known is None and len(self._by_name) >= MAX_MODELS and not self._idle():
            raise FleetMismatchError(
                f"served_model {info.served_model!r}: at most {MAX_MODELS} models are served side by side"
            )

    def admit(self, info: WorkerInfo) -> None:
        """A worker has joined; its model comes with it where it is new, or has another geometry than before."""
        known = self._by_name.get(info.served_model)
        if known is not None and known.geometry == info.geometry:
            return
        if known is None and len(self._by_name) >= MAX_MODELS:
            del self._by_name[self._idle()[0]]
        self._by_name[info.served_model] = ModelRouting(
            info.served_model,
            info.geometry,
            (known or self._nameless).policy,
            self._profiles.get(info.geometry.fingerprint),
            self._seed,
            self._predictor(),
        )

    def set_policy(self, name: str, options: Mapping[str, float], model: str = "") -> None:
        """Switches the policy of one model; of all, and of those to come, where none is named.

        All or none: raises PolicyError, UnknownModelError before the first is switched.
        """
        asked = [self.find(model)] if model else [self._nameless, *self._by_name.values()]
        before = [routing.policy for routing in asked]
        try:
            for routing in asked:
                routing.set_policy(name, options)
        except PolicyError:
            for routing, policy in zip(asked, before, strict=True):
                routing.set_policy(*policy)
            raise

    def load_profile(self, profile: Profile) -> None:
        """Replaces the profile of every model of its fingerprint. Raises ProfileError where there is none."""
        mine = [
            routing
            for routing in self._by_name.values()
            if routing.geometry is not None and routing.geometry.fingerprint == profile.fingerprint
        ]
        for routing in mine or self.all():
            routing.load_profile(profile)
        self._nameless.load_profile(profile)
        self._profiles[profile.fingerprint] = profile

    def _idle(self) -> list[str]:
        served = self._fleet.models()
        return [name for name in self._by_name if name not in served]
