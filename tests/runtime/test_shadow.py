"""Notes of copies and fills, played on the host and compared with torch's; and where buffers that
a walk needs for a while find their place."""

import random
import struct

import pytest
import torch

from megatron_distflash.runtime.shadow import ALIGNMENT_BYTES, Notes, NotOnTape
from megatron_distflash.runtime.tape import _arrange

native = pytest.importorskip(
    "megatron_distflash.runtime._native", reason="the native module is not built"
)

CPU = torch.device("cpu")


def play(notes: Notes, tensors: list[torch.Tensor]) -> None:
    """On buffers in the order in which they were noted."""
    communicator = native.Communicator.host(native.HostHub(1), 0, 5.0)
    executor = native.Executor(communicator, "nothing", 1, 0, [])
    tape = native.Tape(executor, {}, len(tensors), notes.notes)
    tape.run([x.data_ptr() for x in tensors], 0)
    communicator.close(5.0)


def random_view(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """A part of ``x``, dims in any order."""
    for dim in range(x.dim()):
        start = rng.randrange(x.shape[dim])
        x = x.narrow(dim, start, rng.randint(1, x.shape[dim] - start))
    order = list(range(x.dim()))
    if rng.random() < 0.5:
        rng.shuffle(order)
    return x.permute(order)


def whole_and_part(rng: random.Random, notes: Notes, dtype: torch.dtype):
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    whole = torch.randn(shape).to(dtype)
    part = random_view(rng, whole)
    shadow = notes.new(whole.shape, dtype)
    shadow = shadow.as_strided(part.shape, part.stride(), part.storage_offset())
    return whole, part, shadow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_copies_are_those_of_torch(dtype):
    seed = random.randrange(2**31)
    rng, num_noted = random.Random(seed), 0
    torch.manual_seed(seed)
    for _ in range(400):
        notes = Notes(CPU)
        whole, part, shadow = whole_and_part(rng, notes, dtype)
        made = torch.full(part.shape, 7.0).to(dtype)
        try:
            made_shadow = shadow.new_empty(part.shape).copy_(shadow)
        except NotOnTape:
            continue
        num_noted += 1
        assert made_shadow.stride() == made.stride()
        play(notes, [whole, made])
        assert torch.equal(made, part), f"seed {seed}: {part.shape}, {part.stride()}"
    assert num_noted > 200


def test_fills_are_those_of_torch():
    seed = random.randrange(2**31)
    rng, num_noted = random.Random(seed), 0
    torch.manual_seed(seed)
    for value in [0.0, -torch.inf, 2.5] * 100:
        notes = Notes(CPU)
        whole, part, shadow = whole_and_part(rng, notes, torch.float32)
        wanted = whole.clone()
        wanted.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(value)
        try:
            shadow.fill_(value)
        except NotOnTape:
            continue
        num_noted += 1
        play(notes, [whole])
        assert torch.equal(whole, wanted), f"seed {seed}: {part.shape}, {part.stride()}"
    assert num_noted > 100


def test_contiguous_shadows_stay():
    notes = Notes(CPU)
    x = notes.new((4, 1, 3), torch.float32)
    assert x.contiguous() is x and not notes.notes
    assert x.as_strided((4, 1, 3), (3, 99, 1), 0).is_contiguous()  # a dim of one has any stride
    assert x.as_strided((4, 1, 2), (3, 3, 1), 1).contiguous().stride() == (2, 2, 1)
    assert [kind for kind, *_ in notes.notes] == ["copy"]
    empty = notes.new((0, 3), torch.float32)
    empty.permute(1, 0).contiguous(), empty.zero_()
    assert len(notes.notes) == 1


def test_what_no_note_can_say_is_refused():
    notes = Notes(CPU)
    x, y = notes.new((4, 3), torch.float32), notes.new((4, 3), torch.bfloat16)
    for wrong in (
        lambda: x.copy_(y),
        lambda: y.zero_(),
        lambda: x + x,
        lambda: x.to(torch.bfloat16),
        lambda: x.as_strided((4, 3), (0, 1), 0).contiguous(),
        lambda: x.as_strided((4, 3), (2, 1), 0).contiguous(),
    ):
        with pytest.raises(NotOnTape):
            wrong()
    assert not notes.notes


def test_addresses_of_shadows_are_aligned_and_differ():
    notes = Notes(CPU)
    x, y = (notes.new((4, 8), torch.bfloat16) for _ in range(2))
    assert x.data_ptr() % 256 == 0 and x.data_ptr() != y.data_ptr()
    assert x.as_strided((3, 8), (8, 1), 8).data_ptr() == x.data_ptr() + 16


@pytest.mark.parametrize("turn", range(20))
def test_buffers_that_live_together_do_not_share_scratch(turn):
    seed = random.randrange(2**31)
    rng, notes = random.Random(seed), Notes(CPU)
    living, together, most_bytes = [], {}, 0
    for _ in range(60):
        if living and rng.random() < 0.5:
            living.pop(rng.randrange(len(living)))
            continue
        living.append(notes.new((rng.randint(0, 2000),), torch.uint8))
        together[living[-1].buffer.number] = [x.buffer.number for x in living]
        most_bytes = max(most_bytes, sum(notes.num_bytes[x.buffer.number] for x in living))
    outside = {living[0].buffer.number: (0, 0)} if living else {}
    places, scratch_bytes = _arrange(notes, outside)
    assert set(places) == set(range(len(notes.num_bytes))) - set(outside)
    assert all(place % ALIGNMENT_BYTES == 0 for place in places.values())
    for number, others in together.items():
        spans = sorted((places[x], places[x] + notes.num_bytes[x]) for x in others if x in places)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), f"seed {seed}"
        assert not spans or spans[-1][1] <= scratch_bytes, number
    assert scratch_bytes <= 2 * most_bytes + 60 * ALIGNMENT_BYTES


def test_numbers_are_filled_as_bits():
    notes = Notes(CPU)
    notes.new((2,), torch.float32).fill_(-torch.inf)
    ((kind, _, _, numbers, _),) = notes.notes
    assert kind == "fill" and struct.pack("<I", numbers[-1]) == struct.pack("<f", -torch.inf)
