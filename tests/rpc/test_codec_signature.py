"""Signatures survive the wire unchanged, and nothing malformed becomes a signature."""

import base64
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr.rpc import codec
from eldr.rpc.codec import CodecError
from eldr.rpc.settings import MAX_MESSAGE_BYTES
from eldr.signature.expert_signature import ExpertSignature
from eldr.v1 import signature_pb2


def make_signature(
    layers: int, experts: int, top_k: int, tokens: int, seed: int = 0, missing: int = 0
) -> ExpertSignature:
    """A prompt of `tokens` tokens that selected `top_k` different experts per token and layer."""
    rng = np.random.default_rng(seed)
    covered = tokens - missing
    counts = np.zeros((layers, experts), np.uint32)
    for layer in range(layers):
        picks = rng.random((covered, experts)).argsort(axis=1)[:, :top_k]
        np.add.at(counts[layer], picks.ravel(), 1)
    return ExpertSignature("sha256:ab", top_k, tokens, covered, counts)


@st.composite
def signatures(draw: st.DrawFn) -> ExpertSignature:
    layers, experts = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    # Beyond one and two bytes a count, without as many tokens.
    factor = draw(st.sampled_from([1, 300, 70_000]))
    small = make_signature(
        layers, experts, draw(st.integers(1, experts)), draw(st.integers(0, 30)), draw(st.integers(0, 99))
    )
    covered = small.covered_tokens * factor
    return ExpertSignature(
        draw(st.text(min_size=1, max_size=20)),
        small.top_k,
        covered + draw(st.integers(0, 1 << 40)),
        covered,
        small.counts * np.uint32(factor),
    )


def assert_same(a: ExpertSignature, b: ExpertSignature) -> None:
    for field in ("fingerprint", "top_k", "tokens", "covered_tokens"):
        assert getattr(a, field) == getattr(b, field)
    np.testing.assert_array_equal(a.counts, b.counts)
    assert a.counts.dtype == b.counts.dtype == np.uint32


@given(signatures())
def test_a_signature_survives_message_bytes_and_text(signature: ExpertSignature) -> None:
    raw = codec.encode_signature(signature).SerializeToString()
    assert_same(codec.decode_signature(signature_pb2.ExpertSignature.FromString(raw)), signature)
    assert_same(codec.signature_from_text(codec.signature_to_text(signature)), signature)


@pytest.mark.parametrize(
    ("largest", "width"),
    [
        (0, signature_pb2.COUNT_WIDTH_U8),
        (255, signature_pb2.COUNT_WIDTH_U8),
        (256, signature_pb2.COUNT_WIDTH_U16),
        (65_535, signature_pb2.COUNT_WIDTH_U16),
        (65_536, signature_pb2.COUNT_WIDTH_U32),
        (2**32 - 1, signature_pb2.COUNT_WIDTH_U32),
    ],
)
def test_counts_travel_in_the_narrowest_width_that_holds_the_largest(largest: int, width: int) -> None:
    signature = ExpertSignature("f", 1, largest, largest, np.array([[largest]], np.uint32))
    message = codec.encode_signature(signature)
    assert message.width == width
    assert_same(codec.decode_signature(message), signature)


def test_counts_are_compressed_only_where_most_are_zero() -> None:
    sparse = codec.encode_signature(make_signature(8, 128, 1, 3))
    assert sparse.compression == signature_pb2.COMPRESSION_ZLIB
    assert len(sparse.counts) < 8 * 128
    tiny = codec.encode_signature(make_signature(1, 4, 2, 3))
    assert tiny.compression == signature_pb2.COMPRESSION_NONE
    assert len(tiny.counts) == 4


def test_counts_that_are_mostly_above_zero_travel_as_they_are() -> None:
    """Inflating them would take longer than the rest of a decision."""
    dense = ExpertSignature("f", 2, 64, 64, np.ones((8, 128), np.uint32))
    message = codec.encode_signature(dense)
    assert message.compression == signature_pb2.COMPRESSION_NONE
    assert_same(codec.decode_signature(message), dense)


def test_partial_coverage_is_said_and_kept() -> None:
    signature = make_signature(2, 8, 2, tokens=10, missing=4)
    back = codec.decode_signature(codec.encode_signature(signature))
    assert (back.tokens, back.covered_tokens, back.coverage) == (10, 6, 0.6)


@pytest.mark.parametrize("block_size", [16, 128])
def test_a_signature_of_60_layers_256_experts_and_4k_blocks_fits_a_message(block_size: int) -> None:
    """Case 4.2: the widest model, a prompt of 4,096 blocks."""
    tokens, top_k = 4096 * block_size, 8
    rng = np.random.default_rng(1)
    counts = np.stack([rng.multinomial(tokens * top_k, np.full(256, 1 / 256)) for _ in range(60)])
    signature = ExpertSignature("sha256:ab", top_k, tokens, tokens, counts.astype(np.uint32))
    raw = codec.encode_signature(signature).SerializeToString()
    assert len(raw) <= 60 * 256 * 4 + 256
    assert len(raw) * 4 // 3 < MAX_MESSAGE_BYTES // 100
    assert_same(codec.signature_from_text(codec.signature_to_text(signature)), signature)


def tampered(**fields: object) -> signature_pb2.ExpertSignature:
    message = codec.encode_signature(make_signature(2, 4, 2, 5))
    for name, value in fields.items():
        setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (tampered(schema_version=2), "schema_version 2, this side knows 1"),
        (tampered(schema_version=0), "schema_version 0, this side knows 1"),
        (tampered(width=signature_pb2.COUNT_WIDTH_UNSPECIFIED), "unknown count width 0"),
        (tampered(width=77), "unknown count width 77"),
        (tampered(compression=signature_pb2.COMPRESSION_UNSPECIFIED), "unknown compression 0"),
        (tampered(compression=9), "unknown compression 9"),
        (tampered(layers=0), "layers \\* experts must be 1 to"),
        (tampered(layers=3), "counts hold 8 bytes, expected 12"),
        (tampered(experts=3), "counts hold 8 bytes, expected 6"),
        (tampered(width=signature_pb2.COUNT_WIDTH_U16), "counts hold 8 bytes, expected 16"),
        (tampered(layers=1 << 31, experts=1 << 31), "layers \\* experts must be 1 to 16777216"),
        (tampered(counts=b""), "counts hold 0 bytes"),
        (tampered(compression=signature_pb2.COMPRESSION_ZLIB), "do not decompress"),
        (tampered(covered_tokens=4), "layer 0 sums to 10, expected covered_tokens \\* top_k = 4 \\* 2"),
        (tampered(tokens=4), "covered_tokens must be 0 to 4, got 5"),
        (tampered(top_k=3), "layer 0 sums to 10"),
        (tampered(covered_tokens=2**64 - 1, tokens=2**64 - 1, top_k=2**32 - 1), "layer 0 sums to 10"),
        (signature_pb2.ExpertSignature(), "schema_version 0"),
    ],
)
def test_a_message_that_is_not_a_signature_is_refused_by_field(
    message: signature_pb2.ExpertSignature, error: str
) -> None:
    with pytest.raises(CodecError, match=f"^signature: .*{error}"):
        codec.decode_signature(message)


def test_moved_counts_break_token_conservation() -> None:
    """A count that changes its layer changes two sums; the total alone would not show it."""
    counts = np.frombuffer(tampered().counts, np.uint8).reshape(2, 4).copy()
    counts[0, 0] += 1
    counts[1, counts[1].argmax()] -= 1
    with pytest.raises(CodecError, match="layer 0 sums to 11"):
        codec.decode_signature(tampered(counts=counts.tobytes()))


def test_a_small_message_cannot_inflate_to_much_memory() -> None:
    bomb = zlib.compress(bytes(200 << 20), 9)
    message = tampered(compression=signature_pb2.COMPRESSION_ZLIB, counts=bomb)
    with pytest.raises(CodecError, match="counts hold 9 bytes, expected 8"):
        codec.decode_signature(message)


@pytest.mark.parametrize("text", [None, 7, b"CAES", ["CAES"], {"a": 1}])
def test_a_signature_that_is_not_text_is_refused_by_type(text: object) -> None:
    with pytest.raises(CodecError, match=f"expected base64 text, got {type(text).__name__}"):
        codec.signature_from_text(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["not base64!", "AAA", "\N{SNOWMAN}", "a b=", base64.b64encode(b"\xff" * 9).decode()]
)
def test_text_that_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(CodecError, match="not base64 of a signature message"):
        codec.signature_from_text(text)


def test_empty_text_is_no_signature() -> None:
    with pytest.raises(CodecError, match="schema_version 0"):
        codec.signature_from_text("")


@given(st.binary(max_size=300))
def test_random_bytes_never_become_a_signature_and_never_raise_anything_else(raw: bytes) -> None:
    with pytest.raises(CodecError):
        codec.signature_from_text(base64.b64encode(raw).decode())


@given(st.data())
def test_a_flipped_byte_is_refused_or_gives_a_valid_signature(data: st.DataObject) -> None:
    raw = bytearray(codec.encode_signature(make_signature(2, 6, 2, 4)).SerializeToString())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        signature = codec.signature_from_text(base64.b64encode(bytes(raw)).decode())
    except CodecError:
        return
    assert (signature.counts.sum(axis=1) == signature.covered_tokens * signature.top_k).all()


def test_fields_of_a_later_schema_are_ignored_within_one_version() -> None:
    raw = codec.encode_signature(make_signature(1, 4, 1, 3)).SerializeToString() + b"\xa2\x06\x01x"
    back = codec.signature_from_text(base64.b64encode(raw).decode())
    assert_same(back, make_signature(1, 4, 1, 3))
