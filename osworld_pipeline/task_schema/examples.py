"""Parts of the examples of metrics."""


def output_of(*command: str) -> dict[str, object]:
    return {"type": "vm_command_line", "command": list(command)}


def file_at(path: str) -> dict[str, object]:
    return {"type": "vm_file", "path": path, "dest": path.rpartition("/")[2]}


COMMAND = {"type": "vm_command_line", "command": "cat notes/todo.txt", "shell": True}
FILE, WANTED_FILE = file_at("/home/user/notes/todo.txt"), file_at("/home/user/wanted.txt")
