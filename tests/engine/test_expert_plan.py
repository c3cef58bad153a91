"""Plans that place experts on slots: what is refused, and when ranks switch."""

import pytest

from eldr.engine.expert_plan import ExpertPlan, ExpertPlanError, common_version

LAYERS = (1, 2, 3, 5)
FOUR = [0, 1, 2, 3, 0, 2]


def test_a_plan_becomes_a_map_in_the_order_of_the_layers() -> None:
    plan = ExpertPlan(7, {5: [3, 2, 1, 0, 0, 1], 1: FOUR, 2: FOUR, 3: FOUR})
    assert plan.physical_to_logical(LAYERS, 4, 2).tolist() == [FOUR, FOUR, FOUR, [3, 2, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ({1: FOUR, 2: FOUR, 3: FOUR}, r"missing \[5\], unknown \[\]"),
        ({**dict.fromkeys(LAYERS, FOUR), 6: FOUR}, r"missing \[\], unknown \[6\]"),
        (
            {**dict.fromkeys(LAYERS, FOUR), 3: [0, 1, 2, 3]},
            r"unequal numbers of slots: \{1: 6, 2: 6, 3: 4, 5: 6\}",
        ),
        ({layer: [0, 1, 2, 3, 0] for layer in LAYERS}, "5 slots a layer, not a multiple of 2 ranks"),
        ({**dict.fromkeys(LAYERS, FOUR), 2: [0, 1, 2, 2, 0, 2]}, r"layers \[2\] do not"),
        ({**dict.fromkeys(LAYERS, FOUR), 5: [0, 1, 2, 3, 4, 2]}, r"layers \[5\] do not"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused_with_its_layers(
    slots: dict[int, list[int]], said: str
) -> None:
    """Case 6.7: three of four MoE layers, a layer of a draft model, layers with unequal slots."""
    with pytest.raises(ExpertPlanError, match=said):
        ExpertPlan(7, slots).physical_to_logical(LAYERS, 4, 2)


def test_ranks_switch_to_a_version_when_all_of_them_have_it() -> None:
    """Case 6.5."""
    assert common_version([3, 2, 3]) == 2
    assert common_version([3, 3]) == 3
