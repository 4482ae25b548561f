import os

import requests


def get_rule(env, config):
    return config["rules"]


def get_actions(env, config):
    return list(env.action_history)


def get_cache_file(env, config):
    with open(f"{env.cache_dir}/{config['path']}") as file:
        return file.read()


def get_vm_file(env, config):
    """Like OSWorld's: None for a file that cannot be fetched."""
    try:
        return requests.get(f"http://{env.vm_ip}:{env.server_port}/file/{config['path']}", timeout=5).text
    except requests.RequestException:
        return None


def get_tabs(env, config):
    return _connect(env)


def _connect(env):
    return env.chromium_port


def get_page(env, config):
    """The answer of an address, or the reason why there is none."""
    try:
        return requests.get(config["url"], timeout=5).text
    except requests.ConnectionError:
        return "unreachable"


def get_cloud_file(env, config):
    """As OSWorld's: what is in the folder already is not fetched."""
    path = f"{env.cache_dir}/{config['dest']}"
    if not os.path.exists(path):
        with open(path, "w") as file:
            file.write(requests.get(config["path"], timeout=5).text)
    with open(path) as file:
        return file.read()
