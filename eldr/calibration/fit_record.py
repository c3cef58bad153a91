"""What a profile says about its own making."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformQuality:
    """rho of one transform (see `eldr.signature.quality`).

    `rho` over all requests and all layers, weights learned on the same requests: the figure that papers
    quote. `held_out_rho` and `held_out_mask_rho` on requests that neither the weights nor the mask were chosen on,
    over all layers and over `mask`. `order` and `curve` are the greedy selection: layers as they were added,
    rho after each; both are empty, and the mask has all layers, where no selection was run.
    """

    transform: str
    rho: float
    held_out_rho: float
    held_out_mask_rho: float
    mask: tuple[int, ...]
    order: tuple[int, ...] = ()
    curve: tuple[float, ...] = ()

    @property
    def best_held_out_rho(self) -> float:
        """Of the mask or of all layers, whichever is better."""
        return max(self.held_out_rho, self.held_out_mask_rho)

    def best_layers(self, layers: int) -> tuple[int, ...]:
        """The mask where it is better than all `layers`, else all of them."""
        return self.mask if self.held_out_mask_rho > self.held_out_rho else tuple(range(layers))


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """Sizes of the clusters at the fit and how the clustering ended; `objective` is the mean cosine.

    For drift measures, empty in profiles without them: `distances` are quantiles, in steps of 1 %, of 1 - cosine of
    the clustered requests with their nearest centroid, `nearest` the requests per nearest centroid.
    """

    sizes: tuple[int, ...]
    balanced: bool
    objective: float
    iterations: int
    converged: bool
    distinct_rows: int
    distances: tuple[float, ...] = ()
    nearest: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a profile came from. `created` is an ISO 8601 date with time zone."""

    counts_sha256: str
    requests: int
    created: str
    eldr_version: str
    seed: int
