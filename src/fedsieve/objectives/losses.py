"""The losses by the name a model card and a user know them. No torch here."""

from enum import StrEnum


class Loss(StrEnum):
    """The loss of one row, averaged over rows (decision A4: against y, squares without 1/2)."""

    SQUARED = "squared"
    LOGISTIC = "logistic"
    SOFTMAX = "softmax"
    MULTILABEL = "multilabel"
