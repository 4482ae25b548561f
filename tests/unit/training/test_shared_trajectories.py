"""How the screenshots of trajectories are sent between ranks; test_two_ranks.py tests what each rank reads of them."""

from osworld_pipeline.domain.trajectory import LazyImages, Trajectory
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.distributed.shared_trajectories import _pack, share_trajectories


def trajectory(images: object) -> Trajectory:
    return Trajectory(trajectory_id="t", task_id="task", token_ids=(1, 2), response_mask=(0, 1), images=images)  # type: ignore[arg-type]


def test_one_rank_alone_keeps_its_trajectories_unchanged() -> None:
    lazy = trajectory(LazyImages(lambda _: b"never read", ["a"]))
    assert share_trajectories([lazy], ProcessGroup.alone(), None)[0] is lazy


def test_stored_images_are_sent_as_hashes_and_others_as_bytes() -> None:
    def read(sha256: str) -> bytes:
        raise AssertionError(f"{sha256} was read to be sent")

    sent = _pack([trajectory(LazyImages(read, ["a", "b"])), trajectory((b"resized",))], by_hash=True)
    assert sent.hashes == (("a", "b"), None)
    assert [tuple(item.images) for item in sent.trajectories] == [(), (b"resized",)]
    held = _pack([trajectory(LazyImages(str.encode, ["a"]))], by_hash=False)
    assert tuple(held.trajectories[0].images) == (b"a",)
