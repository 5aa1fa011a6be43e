"""The picture and the table of rooms are those of the code."""

from docs import rooms


def test_the_page_and_its_picture_are_up_to_date():
    for path, text in rooms.written().items():
        assert path.read_text(encoding="utf-8") == text, "run: python -m docs.rooms"


def test_arrows_that_are_left_out_are_led_to_by_others():
    _, imports = rooms.modules_and_imports(rooms.floors_of_contracts())
    shown: dict[rooms.Room, set[rooms.Room]] = {room: set() for room in imports}
    for room, other in rooms.shown_imports(imports):
        shown[room].add(other)

    def reached(room: rooms.Room, by: dict[rooms.Room, set[rooms.Room]]) -> set[rooms.Room]:
        return by[room].union(*(reached(other, by) for other in by[room]))

    assert sum(map(len, shown.values())) < sum(map(len, imports.values()))
    for room in imports:
        assert reached(room, shown) == reached(room, imports)
