"""DSPy: a typed prediction by its JSON adapter, and a plain call."""

import os
from typing import Literal

import dspy

lm = dspy.LM(
    "openai/" + os.environ["MODEL"], api_base=os.environ["URL"] + "/v1", api_key="none",
    max_tokens=200, temperature=0.0, cache=False,
)  # fmt: skip
assert lm("Say hello.")[0]
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Mood(dspy.Signature):
    """Say how somebody feels."""

    sentence: str = dspy.InputField()
    mood: Literal["happy", "sad"] = dspy.OutputField()


assert dspy.Predict(Mood)(sentence="What a day!").mood in ("happy", "sad")
