import asyncio

from env_server.providers.stderr_tail import StderrTail


async def test_the_last_lines_of_a_process_are_kept_without_the_line_of_every_start_of_xvfb() -> None:
    tail = StderrTail()
    script = "printf 'first\\nscreen 0 shmid 7\\nlast' >&2; exec sleep 0.01"
    with tail.capture() as stderr:
        process = await asyncio.create_subprocess_exec("sh", "-c", script, stderr=stderr)
    async with asyncio.timeout(10):
        await tail.is_silent.wait()
        await process.wait()
    assert tail.lines == ["first", "last"]
