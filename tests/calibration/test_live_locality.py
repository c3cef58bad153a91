import numpy as np
import pytest

from eldr.calibration.live import CountSpace, LiveLocality, SignatureWindow, unit_vectors
from eldr.calibration.refit import Centroids
from eldr.signature.expert_signature import ExpertSignature
from eldr.signature.geometry import ModelGeometry
from eldr.testing.signatures import fake_signature

OTHER = ModelGeometry(moe_layers=(1,), experts=4, top_k=2, fingerprint="other")
EMPTY = ExpertSignature("fake-model", 2, 4, 0, np.zeros((2, 8), np.uint32))


def test_the_window_gives_what_is_young_enough_in_order():
    window = SignatureWindow()
    signatures = [fake_signature((i, i + 1)) for i in range(4)]
    for second, signature in enumerate(signatures):
        window.add(signature, float(second))
    assert window.since(2.0) == tuple(signatures[2:])
    assert window.since(9.0) == ()


def test_the_window_is_bounded():
    window = SignatureWindow(limit=3)
    for second in range(10):
        window.add(fake_signature(), float(second))
    assert len(window) == len(window.since(0.0)) == 3
    window.clear()
    assert window.since(0.0) == ()


def test_only_signatures_of_the_newest_ones_model_are_given():
    window = SignatureWindow()
    window.add(fake_signature(), 0.0)
    window.add(fake_signature(geometry=OTHER), 1.0)
    assert [s.fingerprint for s in window.since(0.0)] == ["other"]


def test_a_signature_without_tokens_has_no_vector():
    """Case 3.20."""
    assert CountSpace().vector(EMPTY) is None
    assert unit_vectors(CountSpace(), [EMPTY]).shape == (0, 0)
    rows = unit_vectors(CountSpace(), [fake_signature(), EMPTY, fake_signature((2, 3))])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1.0, 1.0], rtol=1e-6)


def test_similarities_are_cosines_and_none_without_centroids():
    live = LiveLocality()
    assert live.owners is None
    assert live.similarities(fake_signature()) is None
    live.centroids = Centroids(
        unit_vectors(CountSpace(), [fake_signature(), fake_signature((4, 5))]), ("b", "a")
    )
    assert live.owners == ("b", "a")
    assert live.similarities(fake_signature()) == pytest.approx([1.0, 0.0])
    assert live.similarities(EMPTY) is None
    assert live.similarities(fake_signature(geometry=OTHER)) is None
