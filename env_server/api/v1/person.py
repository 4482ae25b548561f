"""A person's input for a live desktop, and the demonstrations that are made of it. Only a server that was started with
`allow_takeover` accepts it."""

from fastapi import APIRouter
from pydantic import ConfigDict, Field

from env_server.api.faults import ERROR_ANSWERS
from env_server.api.quick_route import QuickRoute
from env_server.episodes.episode import Episode
from env_server.episodes.person import PersonInputError
from env_server.episodes.table import EpisodeTable
from env_server.settings import Settings
from osworld_pipeline.wire import Message, NextInputAnswer, NextInputRequest


class PersonInput(Message):
    model_config = ConfigDict(extra="forbid", frozen=True)

    action: str = Field(examples=["pyautogui.click(200, 120)"])
    """`pyautogui.f(...)` calls with literal arguments; in a demonstration also DONE or FAIL, its end."""


class PersonInputReply(Message):
    is_queued: bool
    """The episode is a demonstration: its client executes the input as a step. Otherwise it has been executed."""
    num_person_inputs: int
    """Inputs that were executed outside the client's steps: above 0 the episode is touched."""


def person_router(episodes: EpisodeTable, settings: Settings) -> APIRouter:
    router = APIRouter(prefix="/episodes", route_class=QuickRoute, tags=["episodes"], responses=ERROR_ANSWERS)

    def find(episode_id: str) -> Episode:
        if not settings.allow_takeover:
            raise PersonInputError("this env server takes no input of a person; start it with --allow-takeover")
        return episodes.find(episode_id)

    @router.post("/{episode_id}/person/inputs", summary="Send a person's input")
    async def send_input(episode_id: str, message: PersonInput) -> PersonInputReply:
        """Executes it between two calls of the client, and marks the episode as touched; in a demonstration it is
        queued for the client instead. 409 where the server does not allow it, the episode is graded, the demonstration
        has ended, or too many inputs wait."""
        episode = find(episode_id)
        is_queued = episode.demonstration is not None
        await episode.person_input(message.action)
        return PersonInputReply(is_queued=is_queued, num_person_inputs=episode.num_person_inputs)

    @router.post("/{episode_id}/person/next", summary="Take a person's next input")
    async def next_input(episode_id: str, message: NextInputRequest) -> NextInputAnswer:
        """Serves a client that records a demonstration. The first request makes the episode one: a person's inputs are
        then queued, and the client executes them as its steps."""
        found = await find(episode_id).next_person_input(message.after, wait_s=message.wait)
        return NextInputAnswer() if found is None else NextInputAnswer(number=found[0], action=found[1])

    return router
