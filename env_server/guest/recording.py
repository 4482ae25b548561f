"""Records a video of the screen, as OSWorld's guests do: ffmpeg writes the display to an MP4 between two calls."""

import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

from .programs import start_program

FRAMES_PER_S = 10
MAX_BYTES = 256 * 1024 * 1024
"""ffmpeg stops at this size; the folder of the file is part of the desktop's memory."""
START_LIMIT_S = 25.0
STOP_LIMIT_S = 20.0


class RecordingError(Exception):
    """Recording is impossible; the message says why, `status` is the answer's."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Recorder:
    """Makes at most one recording at a time. Methods are safe to call from several threads."""

    def __init__(self, *, width: int, height: int, folder: Path, display: str | None = None) -> None:
        """`display` names the X display; None means the one of the environment."""
        self._size, self._folder = (width, height), folder
        self._display = display or os.environ.get("DISPLAY", ":0")
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def file(self) -> Path:
        return self._folder / "recording.mp4"

    def start(self) -> None:
        """Returns when ffmpeg has opened its file. RecordingError if it is already recording, or cannot."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                raise RecordingError("Recording is already in progress.", status=400)
            program = shutil.which("ffmpeg")
            if program is None:
                message = "this desktop has no ffmpeg; install Debian's ffmpeg on the host or image that has its /usr"
                raise RecordingError(message, status=501)
            self.file.unlink(missing_ok=True)
            self._process = start_program(
                [program, *_arguments(self._display, self._size, self.file)],
                serves_calls=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            until = time.monotonic() + START_LIMIT_S
            while not self.file.exists():
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RecordingError(f"ffmpeg does not record: {self._end()}", status=500)
                time.sleep(0.01)

    def stop(self) -> Path:
        """Returns the finished file. RecordingError if nothing is being recorded, or recording failed."""
        with self._lock:
            if self._process is None:
                raise RecordingError("No recording in progress to stop.", status=400)
            complaint = self._end()
            if not self.file.is_file() or not self.file.stat().st_size:
                raise RecordingError(f"ffmpeg wrote no recording: {complaint}", status=500)
            return self.file

    def _end(self) -> str:
        """Ends ffmpeg so that it completes its file; returns its last error message."""
        process, self._process = self._process, None
        assert process is not None, "only called while ffmpeg is running"
        process.send_signal(signal.SIGINT)
        try:
            complaint = process.communicate(timeout=STOP_LIMIT_S)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            complaint = process.communicate()[1]
        return complaint.decode("utf-8", "replace").strip()[-300:]


def _arguments(display: str, size: tuple[int, int], file: Path) -> list[str]:
    width, height = size
    grab = ["-f", "x11grab", "-draw_mouse", "1", "-framerate", str(FRAMES_PER_S), "-video_size", f"{width}x{height}"]
    # Every player supports 4:2:0 chroma subsampling, which needs even numbers of lines and columns.
    code = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p"]
    limits = ["-threads", "1", "-fs", str(MAX_BYTES), "-y", str(file)]
    return ["-nostdin", "-loglevel", "error", *grab, "-i", display, *code, *limits]
