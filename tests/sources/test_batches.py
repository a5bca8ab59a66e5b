from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.sources.batches import Read, batches
from streamload.sources.system import BLOCK

LIMIT = 8 * BLOCK


class Keep:
    wanted = 0

    def __call__(self, window, start):
        raise AssertionError("not delivered here")


@st.composite
def reads(draw):
    """Reads in file order with gaps below, at and above a block; straight ones may be longer than a batch."""
    result, offset = [], draw(st.integers(0, 3 * BLOCK))
    for tag in range(draw(st.integers(0, 12))):
        offset += draw(st.sampled_from([0, 0, 0, 1, BLOCK - 1, BLOCK, 5 * BLOCK]))
        sink = draw(st.sampled_from([None, None, Keep()]))
        nbytes = draw(st.integers(1, LIMIT if sink else 5 * LIMIT))
        result.append(Read(offset, nbytes, 0 if sink else 1_000_000 * (tag + 1), sink, tag))
        offset += nbytes
    return result


@settings(max_examples=300, deadline=None)
@given(reads())
def test_every_byte_is_read_once_into_its_place(wanted):
    seen: dict[int, list[tuple[int, int, int]]] = {}
    for batch in batches(wanted, LIMIT):
        assert 0 < batch.end - batch.start <= LIMIT
        assert batch.straight == all(read.sink is None for read in batch.reads)
        assert batch.reads[0].offset == batch.start
        assert batch.reads[-1].offset + batch.reads[-1].nbytes == batch.end
        end = batch.start
        for read in batch.reads:
            assert 0 <= read.offset - end < BLOCK
            end = read.offset + read.nbytes
            seen.setdefault(read.tag, []).append((read.offset, read.nbytes, read.address))
    assert list(seen) == [read.tag for read in wanted]
    for read in wanted:
        parts = seen[read.tag]
        offset, address = read.offset, read.address
        for part_offset, nbytes, part_address in parts:
            assert (part_offset, part_address) == (offset, address if read.sink is None else 0)
            offset, address = offset + nbytes, address + nbytes
        assert offset == read.offset + read.nbytes
        assert read.sink is None or len(parts) == 1


def test_long_read_is_cut_on_blocks():
    starts = [batch.start for batch in batches([Read(100, 5 * LIMIT, 7, None, 0)], LIMIT)]
    assert starts[0] == 100
    assert [start % BLOCK for start in starts[1:]] == [0] * 5


def test_neighbours_share_a_batch_and_distant_reads_do_not():
    near = [Read(0, 10, 1, None, 0), Read(20, 10, 2, None, 1)]
    far = [Read(0, 10, 1, None, 0), Read(10 + BLOCK, 10, 2, None, 1)]
    assert [len(batch.reads) for batch in batches(near, LIMIT)] == [2]
    assert [len(batch.reads) for batch in batches(far, LIMIT)] == [1, 1]


def test_the_same_bytes_can_be_wanted_twice():
    # torch.save writes tensors that share a storage as two views of the same bytes.
    twice = [Read(0, 10, 1, None, 0), Read(0, 10, 2, None, 1)]
    assert [(batch.start, batch.end) for batch in batches(twice, LIMIT)] == [(0, 10), (0, 10)]


def test_a_batch_never_needs_more_buffers_than_a_call_takes():
    tiny = [Read(3 * at, 1, at + 1, None, at) for at in range(3000)]
    assert max(len(batch.reads) for batch in batches(tiny, 1 << 20)) <= 512
