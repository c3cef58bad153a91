"""How the requests of one served model are placed: its policy and profile, and what both have learned."""

import copy
from collections.abc import Mapping

import structlog

from eldr.calibration.live import LiveLocality, SignatureWindow
from eldr.calibration.profile import Profile, ProfileError
from eldr.calibration.refit import Centroids
from eldr.routing.contract import Decision, DecodeRequest, DecoderView, Prepares
from eldr.routing.locality_band_online import LocalityBandOnline
from eldr.routing.predictor import Predictor
from eldr.routing.registry import Sources, available, make_policy
from eldr.routing.step_time import StepTimes
from eldr.signature.expert_signature import ExpertSignature
from eldr.signature.geometry import ModelGeometry

log = structlog.get_logger()


class ModelRouting:
    """`geometry` is None where no worker has come yet. Raises PolicyError, ProfileError."""

    def __init__(
        self,
        name: str,
        geometry: ModelGeometry | None,
        policy: tuple[str, Mapping[str, float]],
        profile: Profile | None,
        seed: int,
        predictor: Predictor,
    ) -> None:
        self.name = name
        self.geometry = geometry
        self.live = LiveLocality()
        """Centroids that `LiveFit` refits behind the decisions, begun with the profile's."""
        self.window = SignatureWindow()
        self.step_times = StepTimes()
        self.predictor = predictor
        self._seed = seed
        self._profile: Profile | None = None
        if profile is not None:
            self._take_profile(profile)
        self._take_policy(*policy)

    def select(self, request: DecodeRequest, views: tuple[DecoderView, ...]) -> Decision:
        """Picks a decoder. Raises NoEligibleDecoderError."""
        return self._policy.select(request, views)

    def dry_run(self, request: DecodeRequest, views: tuple[DecoderView, ...], policy: str = "") -> Decision:
        """What `select` would pick, under another policy where one is named. Changes nothing.

        Raises NoEligibleDecoderError, PolicyError.
        """
        other = policy and policy != self._policy.name
        asked = make_policy(policy, {}, self._sources()) if other else copy.copy(self._policy)
        return asked.select(request, views)

    def prepare(self, views: tuple[DecoderView, ...]) -> None:
        """Does what the next decision would begin with."""
        if self._prepares is not None and self.geometry is not None:
            self._prepares.prepare(views, self.geometry.shape)

    def remember(self, signature: ExpertSignature, now_s: float) -> None:
        """Keeps the signature of a placed request where refits or drift measures read it."""
        if self._profile is not None or self.refits:
            self.window.add(signature, now_s)

    @property
    def policy(self) -> tuple[str, Mapping[str, float]]:
        """Name and options of the policy in force."""
        return self._policy.name, self._policy.options

    @property
    def refits(self) -> bool:
        """Whether the policy in force lives on centroids that are refitted."""
        return self._policy.name == LocalityBandOnline.name

    @property
    def available_policies(self) -> tuple[str, ...]:
        """Names that `set_policy` takes now."""
        return available(self._sources())

    def set_policy(self, name: str, options: Mapping[str, float]) -> None:
        """Switches the policy for the next decision on. Raises PolicyError."""
        self._take_policy(name, options)
        log.info("policy_set", model=self.name, policy=name, options=dict(self._policy.options))

    @property
    def profile(self) -> Profile | None:
        """The profile in force."""
        return self._profile

    def load_profile(self, profile: Profile) -> None:
        """Replaces the profile, also for the policy in force. Raises ProfileError."""
        self._take_profile(profile)
        self._take_policy(*self.policy)
        log.info(
            "profile_loaded", model=self.name, fingerprint=profile.fingerprint, clusters=profile.clusters
        )

    def _take_policy(self, name: str, options: Mapping[str, float]) -> None:
        self._policy = policy = make_policy(name, options, self._sources())
        # Asking for the protocol takes as long as a tenth of a decision.
        self._prepares = policy if isinstance(policy, Prepares) else None

    def _take_profile(self, profile: Profile) -> None:
        if not profile.fingerprint:
            raise ProfileError(
                "fingerprint is empty: the profile names no model, so no live signature fits it"
            )
        if self.geometry is not None:
            profile.require_geometry(self.geometry)
        self._profile = profile
        self.live = LiveLocality(profile, Centroids(profile.centroids))

    def _sources(self) -> Sources:
        return Sources(self._seed, self.step_times, self._profile, self.live, self.predictor)
