"""Generated records: the partly predictable text of logs, tables and settings.

`record(rng)` draws one document. Every format repeats its structure from line to line while the
values vary, so a model can be confident of the keys but not of the values.
"""

import json
import random
from collections.abc import Callable


def words(text: str) -> list[str]:
    return text.split()


NAMES = words(
    "Ada Alan Anna Barbara Carlos Chen Clara David Diego Edith Elena Emil Farah Felix Grace Hana "
    "Hugo Ines Ivan Jonas Julia Kofi Lena Leo Lina Maria Marco Mina Nadia Noah Olga Omar Paula "
    "Priya Rosa Samir Sofia Tomas Vera Yuki"
)
SURNAMES = words(
    "Adams Baker Costa Diaz Evans Fischer Garcia Hansen Ito Jensen Khan Lopez Meyer Novak Okafor "
    "Park Quinn Rossi Silva Tanaka Usman Varga Weber Young Zhang"
)
CITIES = words(
    "Athens Berlin Boston Cairo Chicago Dublin Geneva Hamburg Helsinki Lagos Lima Lisbon London "
    "Madrid Mumbai Nairobi Oslo Paris Prague Rome Seoul Sydney Tokyo Toronto Vienna Warsaw Zurich"
)
ITEMS = words(
    "apples bolts bottles boxes cables candles chairs clocks cups desks doors filters gloves "
    "hammers keys lamps maps mirrors nails paper pencils pipes plates pumps ropes screws shelves "
    "spoons tables tiles tools valves windows wires"
)
COLORS = words("black blue brown green grey orange purple red white yellow")
STATUSES = words("active archived cancelled closed done failed new open paid pending ready shipped")
HOSTS = words("alpha beta cache db delta gateway mail node proxy queue store web worker")
UNITS = words("cm g kg km l m ml mm s")
PATHS = words("account cart health images index items login orders reports search status users")
EVENTS = [
    "cache miss",
    "connection closed",
    "connection opened",
    "file not found",
    "job finished",
    "job started",
    "message received",
    "message sent",
    "request accepted",
    "request rejected",
    "retry scheduled",
    "session expired",
    "task queued",
    "user logged in",
    "user logged out",
]
LEVELS = ("DEBUG", "INFO", "INFO", "INFO", "WARNING", "ERROR")

Field = Callable[[random.Random, int], object]
FIELDS: dict[str, Field] = {
    "id": lambda rng, row: 100 + row,
    "name": lambda rng, row: rng.choice(NAMES),
    "surname": lambda rng, row: rng.choice(SURNAMES),
    "city": lambda rng, row: rng.choice(CITIES),
    "age": lambda rng, row: rng.randint(18, 79),
    "item": lambda rng, row: rng.choice(ITEMS),
    "color": lambda rng, row: rng.choice(COLORS),
    "count": lambda rng, row: rng.randint(1, 40),
    "price": lambda rng, row: rng.randint(1, 99) + rng.choice((0.0, 0.25, 0.5, 0.75)),
    "status": lambda rng, row: rng.choice(STATUSES),
    "active": lambda rng, row: rng.random() < 0.7,
    "date": lambda rng, row: f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
    "host": lambda rng, row: f"{rng.choice(HOSTS)}-{rng.randint(1, 4)}",
    "unit": lambda rng, row: rng.choice(UNITS),
    "email": lambda rng, row: f"{rng.choice(NAMES).lower()}@example.com",
    "score": lambda rng, row: round(rng.random(), 2),
}
Row = dict[str, object]


def rows(rng: random.Random, most: int = 14) -> list[Row]:
    """Draw a table of three to `most` rows and two to six fields, often with `id` first."""
    names = rng.sample([name for name in FIELDS if name != "id"], rng.randint(2, 5))
    if rng.random() < 0.7:
        names.insert(0, "id")
    start = rng.randint(0, 800)
    return [
        {name: FIELDS[name](rng, start + row) for name in names}
        for row in range(rng.randint(3, most))
    ]


def json_lines(table: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in table)


def json_array(table: list[Row]) -> str:
    return json.dumps(table[:6], indent=2) + "\n"


def csv(table: list[Row]) -> str:
    lines = [",".join(table[0])] + [",".join(map(str, row.values())) for row in table]
    return "\n".join(lines) + "\n"


def markdown(table: list[Row]) -> str:
    def line(cells: object) -> str:
        return "| " + " | ".join(map(str, cells)) + " |\n"  # type: ignore[call-overload]

    return line(table[0]) + line(["---"] * len(table[0])) + "".join(line(r.values()) for r in table)


def yaml(table: list[Row]) -> str:
    def entry(row: Row) -> str:
        lines = [f"{key}: {json.dumps(value).strip(chr(34))}" for key, value in row.items()]
        return "  - " + "\n    ".join(lines) + "\n"

    return "records:\n" + "".join(entry(row) for row in table[:8])


def key_value(table: list[Row]) -> str:
    return "".join(" ".join(f"{k}={v}" for k, v in row.items()) + "\n" for row in table)


def sql(table: list[Row]) -> str:
    columns = ", ".join(table[0])

    def line(row: Row) -> str:
        values = ", ".join(f"'{v}'" if isinstance(v, str) else str(v) for v in row.values())
        return f"INSERT INTO records ({columns}) VALUES ({values});\n"

    return "".join(line(row) for row in table[:8])


TABLES = (json_lines, json_lines, csv, csv, markdown, yaml, key_value, json_array, sql)


def log(rng: random.Random) -> str:
    """Draw a server log: time, level, host and event per line."""
    day, second = f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}", rng.randint(0, 80_000)
    lines = []
    for _ in range(rng.randint(5, 16)):
        second += rng.randint(0, 40)
        clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        host, event = rng.choice(HOSTS), rng.choice(EVENTS)
        lines.append(f"{day} {clock} {rng.choice(LEVELS)} {host}: {event} id={rng.randint(1, 999)}")
    return "\n".join(lines) + "\n"


def access(rng: random.Random) -> str:
    """Draw an access log: address, method, path, status and bytes per line."""
    lines = []
    for _ in range(rng.randint(5, 14)):
        method = rng.choice(("GET", "GET", "GET", "POST", "PUT", "DELETE"))
        code = rng.choice((200, 200, 200, 201, 302, 404, 500))
        lines.append(
            f"10.0.{rng.randint(0, 9)}.{rng.randint(1, 99)} {method} "
            f"/{rng.choice(PATHS)}/{rng.randint(1, 99)} {code} {rng.randint(100, 9000)}"
        )
    return "\n".join(lines) + "\n"


def ini(rng: random.Random) -> str:
    """Draw an INI file of a few sections."""
    sections = []
    for host in rng.sample(HOSTS, rng.randint(2, 4)):
        lines = [
            f"host = {host}.example.com",
            f"port = {rng.choice((80, 443, 5432, 6379, 8000, 8080, 9000))}",
            f"user = {rng.choice(NAMES).lower()}",
            f"timeout = {rng.choice((5, 10, 15, 30, 60, 120))}",
            f"retries = {rng.randint(1, 9)}",
            f"enabled = {rng.choice(('true', 'true', 'false'))}",
            f"path = /var/{host}/{rng.choice(PATHS)}",
        ]
        kept = [line for line in lines if rng.random() < 0.75]
        sections.append("\n".join([f"[{host}]", *kept]))
    return "\n\n".join(sections) + "\n"


def record(rng: random.Random) -> str:
    """Draw one document in a random format."""
    form = rng.randrange(len(TABLES) + 4)
    if form < len(TABLES):
        return TABLES[form](rows(rng))
    return (log, log, access, ini)[form - len(TABLES)](rng)
