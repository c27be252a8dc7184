"""Tiles of a persistent Hopper kernel: their numbers, their records, and who deals them.

A tile is one query block of one head; every role of a thread block reads its record. p and z hold
the constants of the program and its run-time sizes (`plan` and `sizes` of the kernel file).
"""

from tvm.script import tirx as T

from fa2tvm.blocks import visible_keys
from fa2tvm.kernels.wgmma import broadcast


def clamp(x, low, high):
    """TensorIR's clamp, for the block ranges."""
    return T.max(low, T.min(x, high))


# The rings order these accesses; they are atomics because racecheck follows no mbarriers and would
# report ordinary ones.
_PUBLISH = """
__device__ __forceinline__ void fa2tvm_publish(int* field, int value) { atomicExch(field, value); }
"""
_OBSERVE = """
__device__ __forceinline__ int fa2tvm_observe(int* field) { return atomicAdd(field, 0); }
"""


def publish(records, stage, field, value):
    """Write a field of a tile's record."""
    T.evaluate(
        T.cuda.func_call(
            "fa2tvm_publish",
            records.ptr_to([stage, field]),
            value,
            source_code=_PUBLISH,
            return_type="void",
        )
    )


def observe(records, stage, field):
    """A field of a tile's record."""
    pointer = records.ptr_to([stage, field])
    return T.cuda.func_call("fa2tvm_observe", pointer, source_code=_OBSERVE, return_type="int32")


@T.meta_class
class Tile:
    """A query block i of head h of batch b with key blocks [0, j_end); [0, j_full) need no mask.

    h counts units of z.heads_of_unit heads, which share a tile: 1, or those of a key head. j_end is
    0 after the last tile; `exact` tiles must not trust their maxima.

    The scheduler gives tiles through a ring of two stages, but their records are four: that of tile
    n is written again for tile n + 4, after every consumer has taken n + 2 and so stored n. Hence a
    consumer reads again where its O_i goes instead of carrying it.
    """

    FIELDS, RECORDS = 6, 4

    def __init__(self):
        self.i = T.local_scalar("int32")
        self.h = T.local_scalar("int32")
        self.b = T.local_scalar("int32")
        self.j_end = T.local_scalar("int32")
        self.j_full = T.local_scalar("int32")
        self.exact = T.local_scalar("int32")

    @T.inline
    def put(self, records, n):
        """Scheduler: write the record of tile n."""
        publish(records, n, 0, self.i)
        publish(records, n, 1, self.h)
        publish(records, n, 2, self.b)
        publish(records, n, 3, self.j_end)
        publish(records, n, 4, self.j_full)
        publish(records, n, 5, self.exact)

    @T.inline
    def get(self, records, n):
        """Producer: read what it needs of the record of tile n."""
        self.i = observe(records, n, 0)
        self.h = observe(records, n, 1)
        self.b = observe(records, n, 2)
        self.j_end = observe(records, n, 3)

    @T.inline
    def get_blocks(self, records, n, lane):
        """A consumer warp: read which blocks tile n has, one lane a field."""
        field: T.int32 = 0
        if lane < self.FIELDS:
            field = observe(records, n, lane)
        self.i = broadcast(field, 0)
        self.j_end = broadcast(field, 3)
        self.j_full = broadcast(field, 4)
        self.exact = broadcast(field, 5)


@T.meta_class
class Place:
    """Where a tile's O_i goes: query block i of head h of batch b, read again by a warp."""

    def __init__(self):
        self.i = T.local_scalar("int32")
        self.h = T.local_scalar("int32")
        self.b = T.local_scalar("int32")

    @T.inline
    def get(self, records, n, lane):
        """Read it from the record of tile n."""
        field: T.int32 = 0
        if lane < 3:
            field = observe(records, n, lane)
        self.i = broadcast(field, 0)
        self.h = broadcast(field, 1)
        self.b = broadcast(field, 2)


@T.inline
def decode(p, z, index, tile):
    """From a tile's number to the tile; one that sees nothing still gets one block, all masked.

    Tiles are numbered by rounds of heads, within a round longest query block first: the K and V of
    a round stay in L2, and the short tiles fill the gaps at the end.
    """
    round: T.let = T.truncdiv(index, z.walked_tiles)
    within: T.let = index - round * z.walked_tiles
    walked: T.let = T.min(z.walked, z.batch_units - round * z.walked)
    rank: T.let = T.truncdiv(within, walked)
    unit: T.let = round * z.walked + (within - rank * walked)
    tile.i = z.query_blocks - 1 - rank
    tile.b = T.truncdiv(unit, z.units)
    tile.h = unit - tile.b * z.units
    if p.causal:
        first: T.let = tile.i * z.block_queries
        last: T.let = T.min(first + z.block_queries, z.seq_q) - 1
        to_first: T.let = visible_keys(first, z.seq_kv, True, z.causal_offset, clamp)
        to_last: T.let = visible_keys(last, z.seq_kv, True, z.causal_offset, clamp)
        tile.j_end = T.truncdiv(T.max(to_last, 1) + (p.block_kv - 1), p.block_kv)
        # One key less: then each row has a maximum from its masked blocks, which the others trust.
        tile.j_full = T.truncdiv(T.max(to_first - 1, 0), p.block_kv)
    else:
        tile.j_end = z.key_blocks
        tile.j_full = z.key_blocks


@T.meta_class
class Scheduler:
    """One thread that hands this thread block's tiles to the other roles.

    Static: every z.blocks-th tile. Dynamic: the next of a counter that all thread blocks share,
    drawn when the producer comes to the last key block of a tile, so that a block that lags takes
    fewer (drawn one or two tiles ahead, causal d=256 lost 20 %: H200, 2026-11-30); the last draw
    leaves the counter as the next launch needs it. The divisions run beside the GEMMs.

    With `trust_maximum` the consumers report on each tile, and one that failed is handed over again
    as an exact one: a tile's result depends on nothing but its data.
    """

    def __init__(self, p, z, shared, counter):
        self.p, self.z, self.shared, self.counter = p, z, shared, counter
        self.ring = shared.tile_ring.producer()
        self.request = shared.request_ring.consumer()
        self.report = shared.report_ring.consumer()
        self.tile = Tile()
        self.index = T.local_scalar("int32")
        self.fresh = T.local_scalar("int32")
        self.due = T.local_scalar("int32")
        self.failed = T.local_scalar("int32")

    @T.inline
    def hand_over(self):
        """Give the tile to the other roles."""
        self.ring.acquire_plain()
        self.tile.put(self.shared.tiles, self.ring.fill())
        self.ring.commit()
        self.ring.advance()

    @T.inline
    def hear(self):
        """The number of the tile whose report is due, if it failed, else -1."""
        self.failed = -1
        if self.due >= 0:
            self.report.wait()
            if observe(self.shared.failures, 0, self.report.stage) != 0:
                publish(self.shared.failures, 0, self.report.stage, 0)
                self.failed = self.due
            self.report.release(0)
            self.report.advance()

    @T.inline
    def draw(self):
        """Set `fresh` to the next tile that no role has seen, or past the last one."""
        z = T.meta_var(self.z)
        if self.p.dynamic:
            drawn: T.int32 = T.cuda.atomic_add(self.counter.ptr_to([0]), T.int32(1))
            if drawn == z.tiles - 1:
                self.counter[0] = 0
            self.fresh = drawn + z.blocks
        else:
            self.fresh = self.fresh + z.blocks

    @T.inline
    def run(self, block):
        """All tiles of the thread block, then the end."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.index = block
        self.fresh = block
        self.due = -1
        self.failed = -1
        self.tile.exact = z.exact
        while self.index < z.tiles:
            decode(p, z, self.index, self.tile)
            self.hand_over()
            if p.trust_maximum:
                self.hear()
                self.due = self.index
            if p.dynamic:
                self.request.wait()
                self.request.advance()
            if self.failed < 0:
                if self.fresh < z.tiles:
                    self.draw()
                if p.trust_maximum:
                    if self.fresh >= z.tiles:
                        self.hear()
                        self.due = -1
            self.index = T.Select(self.failed < 0, self.fresh, self.failed)
            self.tile.exact = T.Select(self.failed < 0, z.exact, 1)
        self.tile.j_end = 0
        self.hand_over()


def walked_units(p, seq_kv, units_of_kv):
    """Heads or packs that are walked together: their K and V fill `head_group_mib` of the L2."""
    if p.head_group_mib == 0:
        return T.int32(1)
    row_bytes = 2 * (p.head_dim + p.head_dim_v)
    budget_rows = (p.head_group_mib << 20) // row_bytes
    return units_of_kv * T.max(T.truncdiv(T.int32(budget_rows), seq_kv), 1)


def packing_log2(p, seq_q, group):
    """log2 of the rows that a query has in a tile.

    Where queries alone do not fill a tile, the heads of a key head share it: a row for each of
    them, rounded up to a power of two, so that rows are split by shifts. Else 0.
    """
    rows = T.int32(0)
    for log2 in range(6):
        rows = rows + T.Select(group > 1 << log2, 1, 0)
    return T.Select(T.And(seq_q < p.block_q, group <= 64), rows, 0)
