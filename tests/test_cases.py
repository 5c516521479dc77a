"""The shared case list keeps its promise: every length, every pair of factor values, at most 400 cases."""

from __future__ import annotations

from openkda.testing.cases import FACTORS, LENGTHS, PACKS, all_pairs, kda_cases, pairs


def test_every_length_and_pack_is_there() -> None:
    cases = kda_cases()
    assert len(cases) <= 400
    single = [c.T for c in cases if c.lengths is None]
    assert sorted(single) == sorted(LENGTHS) == [*range(1, 258), 511, 512, 513, 514]
    assert {c.lengths for c in cases if c.lengths is not None} == set(PACKS)
    assert any({0, 1, 2, 63, 64, 65, 129} <= set(p) for p in PACKS)


def test_every_pair_of_factor_values_is_there() -> None:
    covered = set().union(*(pairs({f: getattr(c, f) for f in FACTORS}) for c in kda_cases()))
    missing = all_pairs() - covered
    assert not missing, f"{len(missing)} pairs missing, for example {sorted(map(str, missing))[:3]}"


def test_ids_are_unique_and_inputs_repeat() -> None:
    cases = kda_cases()
    assert len({(c.id, i) for i, c in enumerate(cases)}) == len(cases)
    case = next(c for c in cases if c.T == 17)
    one, two = case.inputs(3), case.inputs(3)
    assert all(bool((one.tensors()[n] == two.tensors()[n]).all()) for n in one.tensors())
