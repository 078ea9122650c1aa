"""The reader of compiled programs that the tests of split calls use."""

from tests.parallel.collectives import Collective, collectives

TEXT = """
%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}
%called (x: f32[4]) -> f32[4] {
  ROOT %cp = f32[4]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
}
%body (x: f32[4]) -> f32[4] {
  ROOT %call = f32[4] call(%x), to_apply=%called
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %a = (f32[4]{0}, bf16[2,3]{1,0}) all-reduce(%x, %y), replica_groups={{0,2},{1,3}}, to_apply=%sum
  %b = s32[3,129]{1,0} all-gather(%x), replica_groups=mesh['a'=2,'b.0'=1,'c.1'=2] {'c.1'}, dimensions={0}
  %c = f32[4]{0} all-to-all(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  ROOT %loop = f32[4] while(%x), condition=%cond, body=%body
}
"""


def test_collectives_of_a_program() -> None:
    """Devices in each notation, bytes of several results, and what the body of a loop calls."""
    columns, rows = (frozenset(map(frozenset, groups)) for groups in (((0, 2), (1, 3)), ((0, 1), (2, 3))))
    assert collectives(TEXT) == [
        Collective("collective-permute", frozenset(), 16, True),
        Collective("all-reduce", columns, 16 + 12, False),
        Collective("all-gather", rows, 4 * 3 * 129, False),
        Collective("all-to-all", columns, 16, False),
    ]
