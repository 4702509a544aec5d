"""Quantised checkpoints for tests, and what they mean, by their published formulas in numpy.

Written apart from the code that serves them: a mistake would have to be made twice to be missed.
"""

from penstock.testing.quantised.folders import (
    save,
    save_int8_reference,
    save_numbers,
    save_stacked_mxfp4,
)
from penstock.testing.quantised.forms import FORMS, Form, int8_numbers
from penstock.testing.quantised.served import rounded_to_int8, served

__all__ = [
    "FORMS",
    "Form",
    "int8_numbers",
    "rounded_to_int8",
    "save",
    "save_int8_reference",
    "save_numbers",
    "save_stacked_mxfp4",
    "served",
]
