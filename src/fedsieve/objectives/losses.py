"""The losses by name, as in model files and options; without torch."""

from enum import StrEnum


class Loss(StrEnum):
    """The loss of one example, averaged over examples (decision A4: squares without 1/2)."""

    SQUARED = "squared"
    LOGISTIC = "logistic"
    SOFTMAX = "softmax"
    MULTILABEL = "multilabel"
