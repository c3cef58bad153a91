"""Which of the new centroids follows which of the old."""

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

Float32Array = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def alignment(centroids: Float32Array, reference: Float32Array) -> Ints:
    """For each reference centroid [m, dimensions] the centroid [n, dimensions] that is most like it, int64 [m].

    Each centroid is used once, the sum of cosines is largest; -1 where there are fewer centroids. With it a refit
    keeps its decoders: `centroids[alignment(centroids, before)]`.
    """
    mine, theirs = linear_sum_assignment(-(reference @ centroids.T))
    order = np.full(len(reference), -1)
    order[mine] = theirs
    return order
