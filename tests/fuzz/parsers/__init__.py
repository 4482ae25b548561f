"""Every parser of foreign bytes, by topic."""

from fuzz.parser import Parser
from fuzz.parsers import actions, guests, metrics, pictures, records, settings, store, tasks, web

PARSERS: dict[str, Parser] = {
    parser.name: parser
    for topic in (actions, guests, metrics, pictures, records, settings, store, tasks, web)
    for parser in topic.PARSERS
}
