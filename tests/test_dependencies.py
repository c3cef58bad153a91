"""What can be checked of the dependencies without a network; docs/security.md says what cannot."""

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement

REQUIREMENTS = [Requirement(line) for line in importlib.metadata.requires("eldr") or ()]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_a_requirement_names_the_oldest_version_that_is_tested_for(requirement: Requirement) -> None:
    """A resolver must not fall back to a release from before a known fix. Stubs carry no code of ours."""
    stubs = re.search("^types-|-stubs$", requirement.name)
    own = requirement.name == "eldr"
    assert own or stubs or any(bound.operator in (">=", "==") for bound in requirement.specifier)
    assert requirement.url is None


@pytest.mark.parametrize(
    "requirement",
    [found for found in REQUIREMENTS if found.marker is None or found.marker.evaluate({"extra": "test"})],
    ids=str,
)
def test_what_is_installed_here_fits_what_is_required(requirement: Requirement) -> None:
    if requirement.name != "eldr":
        assert requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
