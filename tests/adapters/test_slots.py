import pytest

from lora_backends import InvalidInputError
from lora_backends.adapters import SlotTable
from lora_backends.adapters.pool.slots import REMEMBERED


def put(table, *names):
    for name in names:
        slot, _ = table.candidate(name)
        table.vacate(name, slot)
        table.assign(name, slot)
    return table


def test_free_slots_are_taken_first():
    table = put(SlotTable(3), "a", "b")
    assert [table.slot("a"), table.slot("b")] == [0, 1]
    table.release("a")
    assert put(table, "c").slot("c") == 0


def test_the_least_recently_used_is_evicted():
    table = put(SlotTable(2), "a", "b")
    table.slot("a")
    assert table.candidate("c") == (1, "b")
    put(table, "c")
    assert table.names == ["a", "c"]


def test_a_pinned_adapter_stays():
    table = put(SlotTable(2), "a", "b")
    table.pin("a")
    put(table, "c", "d")
    assert "a" in table and table.names == ["a", "d"]
    table.unpin("a")
    assert table.candidate("e")[1] in ("a", "d")


def test_a_full_pool_of_pinned_adapters_takes_no_more():
    table = put(SlotTable(1), "a")
    table.pin("a")
    with pytest.raises(InvalidInputError, match="all 1 are pinned"):
        table.candidate("b")
    with pytest.raises(InvalidInputError, match="cannot be unloaded"):
        table.release("a")
    with pytest.raises(InvalidInputError, match="cannot be replaced"):
        table.candidate("a")


def test_a_call_in_flight_holds_its_adapters():
    table = put(SlotTable(1), "a")
    with table.in_use(["a"]) as slots:
        assert slots == {"a": 0}
        with pytest.raises(InvalidInputError, match="in use"):
            table.candidate("b")
    assert table.candidate("b") == (0, "a")


def test_a_failed_call_holds_nothing():
    table = put(SlotTable(1), "a")
    with pytest.raises(InvalidInputError), table.in_use(["a", "nobody"]):
        pass
    with pytest.raises(RuntimeError), table.in_use(["a"]):
        raise RuntimeError
    assert table.candidate("b") == (0, "a")


def test_an_evicted_name_is_told_apart_from_an_unknown_one():
    table = put(SlotTable(1), "pirate", "json")
    with pytest.raises(InvalidInputError, match="evicted when 'json' was loaded"):
        table.slot("pirate")
    with pytest.raises(InvalidInputError, match="did you mean 'json'"):
        table.slot("jsn")
    with pytest.raises(InvalidInputError, match="not pinned"):
        table.unpin("json")


def test_a_pool_has_at_least_one_slot():
    with pytest.raises(InvalidInputError, match="max_adapters is 0"):
        SlotTable(0)


def test_a_pin_cannot_be_taken_from_a_running_call():
    table = put(SlotTable(1), "a")
    with table.in_use(["a"]):
        with pytest.raises(InvalidInputError, match="not pinned"):
            table.unpin("a")
        with pytest.raises(InvalidInputError, match="in use by a running call"):
            table.release("a")
    table.release("a")


def test_prepared_adapters_are_named_as_what_holds_a_slot():
    table = put(SlotTable(1), "a")
    with table.in_use(["a"], by="prepared"):
        with pytest.raises(InvalidInputError, match=r"by prepared adapters.*\n.*release\(\) them"):
            table.candidate("a")
        with pytest.raises(InvalidInputError, match=r"release\(\) prepared adapters"):
            table.candidate("b")
    assert table.candidate("a") == (0, None)


def test_a_slot_that_is_written_has_no_name():
    table = put(SlotTable(1), "a")
    table.vacate("b", 0)
    assert table.names == [] and table.candidate("c") == (0, None)
    with pytest.raises(InvalidInputError, match="evicted when 'b' was loaded"):
        table.slot("a")
    table.assign("b", 0)
    table.vacate("b", 0)
    with pytest.raises(InvalidInputError, match="lost when loading its replacement"):
        table.slot("b")


def test_names_that_lost_their_slot_are_remembered_up_to_a_bound():
    table = put(SlotTable(1), *(f"user {i}" for i in range(REMEMBERED + 10)))
    with pytest.raises(InvalidInputError, match="evicted when"):
        table.slot(f"user {REMEMBERED}")
    with pytest.raises(InvalidInputError, match="no adapter named 'user 0'"):
        table.slot("user 0")
    assert len(table._lost) <= REMEMBERED


@pytest.mark.parametrize("name", [["a"], None, 3])
def test_a_name_that_is_no_str_is_refused(name):
    table = put(SlotTable(1), "a")
    for call in (table.slot, table.release, table.pin, table.unpin):
        with pytest.raises(InvalidInputError, match="no adapter named"):
            call(name)


def test_a_name_that_comes_back_has_no_old_pins():
    table = put(SlotTable(1), "a")
    table.pin("a")
    table.unpin("a")
    table.release("a")
    put(table, "a")
    with pytest.raises(InvalidInputError, match="not pinned"):
        table.unpin("a")
