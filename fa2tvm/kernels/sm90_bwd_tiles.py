"""Tiles of the Hopper backward, key blocks, and the producer that deals and feeds them.

p and z hold the constants of the program and its run-time sizes (`plan` and `sizes` of
sm90_bwd.py).
"""

from tvm.script import tirx as T

from fa2tvm.blocks import first_row
from fa2tvm.kernels.sm90_bwd_fragments import draw
from fa2tvm.kernels.sm90_tiles import clamp, publish
from fa2tvm.kernels.wgmma import Descriptor, SharedTile


class Halves(Descriptor):
    """A descriptor in halves whose high one is a single number; see Tile."""

    def __add__(self, offset):
        return Halves(self.low + T.Cast("uint32", offset), self.high)

    def value(self):
        """The 64 bits."""
        return T.bitwise_or(T.Cast("uint64", self.low), T.uint64(self.high << 32))


class Tile(SharedTile):
    """A tile whose descriptors hold one number for all that is constant.

    An expression of constants TVM would share among the sweeps and pass to them as an argument: 524
    bytes of spill at d=256.
    """

    def _descriptor(self, leading, address):
        constant = self._swizzle_mode << 62 | self._eight_rows | leading << 16
        unit = T.bitwise_and(T.shift_right(address, T.uint32(4)), T.uint32(0x3FFF))
        return T.uint64(constant) + T.Cast("uint64", unit)

    def _at(self, leading, unit):
        return Halves(
            unit + T.uint32(leading << 16), self._swizzle_mode << 30 | self._eight_rows >> 32
        )


def head_group_of(p, seq_q, group):
    """Key heads that are walked together: their Q, dO, dQ fill `head_group_mib` of the L2."""
    if p.head_group_mib == 0:
        return T.int32(1)
    row_bytes = 2 * (p.head_dim + p.head_dim_v) + 4 * p.head_dim
    budget_rows = (p.head_group_mib << 20) // row_bytes
    return T.max(T.truncdiv(T.int32(budget_rows), seq_q * group), 1)


@T.meta_class
class KeyTile:
    """Key block j of head h_kv of batch b, which query blocks [i_start, n) see, whole from i_full.

    One that no query sees still gets the last query block, all masked.
    """

    def __init__(self, p, z):
        self.p, self.z = p, z
        self.j = T.local_scalar("int32")
        self.b = T.local_scalar("int32")
        self.h_kv = T.local_scalar("int32")
        self.i_start = T.local_scalar("int32")
        self.i_full = T.local_scalar("int32")

    @T.inline
    def decode(self, index):
        """From a tile's number to the tile.

        Tiles are numbered group of heads by group of heads, within a group longest key block first:
        a group's Q and dO stay in L2, and the short tiles fill the gaps at the end.
        """
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        group: T.let = T.truncdiv(index, z.head_group * z.key_blocks)
        within: T.let = index - group * (z.head_group * z.key_blocks)
        left: T.let = z.batch_heads_kv - group * z.head_group
        # None is left behind the last tile, which consumers decode as well.
        heads: T.let = T.max(T.min(z.head_group, left), 1)
        self.j = T.truncdiv(within, heads)
        head: T.let = group * z.head_group + (within - self.j * heads)
        self.b = T.truncdiv(head, z.heads_kv)
        self.h_kv = head - self.b * z.heads_kv
        first_key: T.let = self.j * p.block_kv
        self.i_start = 0
        self.i_full = 0
        if p.causal:
            first: T.let = first_row(first_key, z.seq_q, True, z.causal_offset, clamp)
            last: T.let = first_row(
                first_key + (p.block_kv - 1), z.seq_q, True, z.causal_offset, clamp
            )
            self.i_start = T.min(T.truncdiv(first, p.block_q), z.query_blocks - 1)
            self.i_full = T.truncdiv(last + (p.block_q - 1), p.block_q)

    def first_head(self):
        """The first of the query heads that share the tile's key head."""
        return self.h_kv * self.z.group


@T.inline
def load_row_statistics(p, z, shared, workspace, row_block, ring):
    """Bring L and D of a query block to the stage of its Q."""
    copy = T.meta_var(T.ptx["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"])
    copy(
        shared.statistics.ptr_to([ring.stage * (2 * p.block_q)]),
        workspace.ptr_to(
            [z.statistics_first + T.Cast("int64", row_block) * T.int64(2 * p.block_q)]
        ),
        T.uint32(p.statistics_bytes),
        ring.barrier(),
    )


@T.inline
def produce(p, z, shared, maps, workspace, block):
    """The producer: one thread deals this block's tiles and loads what they need."""
    Q_ring = shared.Q_ring.producer()
    dO_ring = shared.dO_ring.producer()
    K_ring = shared.K_ring.producer()
    V_ring = shared.V_ring.producer()
    tile_ring = shared.tile_ring.producer()
    tile = KeyTile(p, z)
    index: T.int32 = block
    following: T.int32 = z.tiles
    while index < z.tiles:
        tile_ring.acquire_plain()
        publish(shared.tiles, 0, tile_ring.stage, index)
        tile_ring.commit()
        tile_ring.advance()
        tile.decode(index)
        K_ring.acquire(p.K_tile.bytes)
        p.K_tile.load(
            shared.K,
            K_ring.stage * p.K_tile.elements,
            maps.K,
            tile.j * p.block_kv,
            tile.h_kv,
            tile.b,
            K_ring.barrier(),
        )
        K_ring.advance()
        h: T.int32 = tile.first_head()
        i: T.int32 = tile.i_start
        steps: T.int32 = z.group * (z.query_blocks - tile.i_start)
        first_step: T.int32 = 1
        while steps > 0:
            if steps == 1:
                if p.persistent:
                    following = draw(workspace) + z.blocks
            Q_ring.acquire(p.Q_tile.bytes + p.statistics_bytes)
            p.Q_tile.load(
                shared.Q,
                Q_ring.stage * p.Q_tile.elements,
                maps.Q,
                i * p.block_q,
                h,
                tile.b,
                Q_ring.barrier(),
            )
            row_block: T.let = (tile.b * z.heads + h) * z.query_blocks + i
            load_row_statistics(p, z, shared, workspace, row_block, Q_ring)
            Q_ring.advance()
            if first_step == 1:
                first_step = 0
                V_ring.acquire(p.V_tile.bytes)
                p.V_tile.load(
                    shared.V, 0, maps.V, tile.j * p.block_kv, tile.h_kv, tile.b, V_ring.barrier()
                )
                V_ring.advance()
            dO_ring.acquire(p.dO_tile.bytes)
            p.dO_tile.load(
                shared.dO,
                dO_ring.stage * p.dO_tile.elements,
                maps.dO,
                i * p.block_q,
                h,
                tile.b,
                dO_ring.barrier(),
            )
            dO_ring.advance()
            steps = steps - 1
            i = i + 1
            if i == z.query_blocks:
                i = tile.i_start
                h = h + 1
        index = following
    tile_ring.acquire_plain()
    publish(shared.tiles, 0, tile_ring.stage, z.tiles)
    tile_ring.commit()
