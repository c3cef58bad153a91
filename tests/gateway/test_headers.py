"""What is read from headers."""

import pytest

from eldr.gateway.errors import GatewayError
from eldr.gateway.headers import tenant_of, timeout_of


def test_a_tenant_is_the_trusted_header_else_the_token_else_nobody():
    headers = {"Authorization": "Bearer secret", "x-team": "blue"}
    assert tenant_of(headers, "x-team") == "name:blue"
    by_token = tenant_of(headers, "")
    assert by_token.startswith("token:")
    assert "secret" not in by_token
    assert tenant_of({"Authorization": "Bearer other"}, "") != by_token
    assert tenant_of({}, "x-team") == ""


def test_a_header_that_nobody_configured_names_no_tenant():
    """A client could give itself a new allowance with each request."""
    assert tenant_of({"x-team": "blue"}, "") == ""


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_that_is_no_positive_number_is_refused_by_name(text):
    with pytest.raises(GatewayError, match="x-eldr-timeout must be a positive number"):
        timeout_of({"x-eldr-timeout": text})


def test_no_timeout_is_no_limit():
    assert timeout_of({}) is None
    assert timeout_of({"x-eldr-timeout": "2.5"}) == 2.5
