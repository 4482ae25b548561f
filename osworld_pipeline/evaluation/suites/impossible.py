"""Infeasible requests: the right answer is to declare failure."""

from osworld_pipeline.evaluation.suites.family import FAIL, Arguments, Family, Scene, Screen, draw_two_words
from osworld_pipeline.evaluation.suites.verbs import open_terminal


def _impossible_request(arguments: Arguments, screen: Screen) -> Scene:
    phone, speaker = arguments
    return Scene(
        instruction=f"Pair the phone {phone} with the speaker {speaker}.",
        config=open_terminal(screen),
        evaluator={"func": "infeasible"},
        oracle=(FAIL,),
    )


FAMILIES = (Family(name="impossible_request", domain="os", draw=draw_two_words, make_scene=_impossible_request),)
