"""From the name of a study to the function that builds it."""

from collections.abc import Callable

from fedsieve.studies import ablation, constraint_study, equal_bytes, paper, published_tables, rivals, robustness, topologies
from fedsieve.studies.catalog import STUDIES
from fedsieve.studies.compute import Study
from fedsieve.studies.scale import Scale

BUILDERS: dict[str, Callable[[Scale], Study]] = {
    "table-1": paper.table_1_study,
    "table-2": paper.table_2_study,
    "gates": paper.gates_study,
    "iou": paper.iou_study,
    "learning-rates": paper.learning_rates_study,
    "convergence": paper.convergence_study,
    "real-data": paper.real_data_study,
    "test-time-gates": paper.test_time_gates_study,
    "regimes": paper.regimes_study,
    "heterogeneity": paper.heterogeneity_study,
    "communication": paper.communication_study,
    "starts": paper.starts_study,
    "constraint": constraint_study.constraint_study,
    "robustness": robustness.robustness_study,
    "ablation": ablation.ablation_study,
    "tables": published_tables.tables_study,
    "topologies": topologies.topologies_study,
}
TUNED_STUDIES = {
    "equal-bytes": (equal_bytes.tuning_study, equal_bytes.selected_options, equal_bytes.equal_bytes_study),
    "rivals": (rivals.tuning_study, rivals.selected_options, rivals.rivals_study),
}
"""Studies with tuned options: the tuning study, the selection of options from its rows, and the study with these options."""
assert {*BUILDERS, *TUNED_STUDIES} == STUDIES.keys()
