"""Which queries of a job fill one table, as far as catalogs tell."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stream_merge import ConfigError, MergeFailedError, MergeResult
from stream_merge.jobs.kafka.distinct_targets import OwnTable, Targets
from stream_merge.model.table_ref import TableRef

ELSEWHERE = "s3a://lake/t"


class Catalog:
    """Tables by name; each look is noted."""

    def __init__(self, **places: str) -> None:
        self.places = places
        self.looks: list[str] = []
        self.away = ""

    def place(self, target: TableRef) -> TableRef:
        self.looks.append(target)
        if target == self.away:
            msg = f"the catalog did not give {target!r}"
            raise MergeFailedError(msg, target=target)
        return TableRef(self.places.get(target, target))


class Sink:
    def __init__(self) -> None:
        self.batches: list[int] = []
        self.last_result: MergeResult | None = None

    def __call__(self, batch_df: Any, batch_id: int) -> None:
        self.batches.append(batch_id)


def test_two_names_of_one_place_are_refused_before_anything_is_read() -> None:
    targets = Targets(Catalog(a="/lake/t", b="file:///lake/t", c="`x`.`T`", d="`X`.`t`").place)
    for query in ("a", "c", "a"):  # it starts again
        targets.expect_own(query, TableRef(query))

    for query in ("b", "d"):
        with pytest.raises(ConfigError, match=f"queries '.' and '{query}' write to"):
            targets.expect_own(query, TableRef(query))


def test_a_table_that_its_catalog_places_later_is_looked_for_before_each_batch_until_it_is_there() -> None:
    catalog = Catalog()
    targets = Targets(catalog.place)
    targets.expect_own("one", TableRef("main.db.t"))
    targets.expect_own("other", TableRef(ELSEWHERE))
    one, other = Sink(), Sink()
    merges, too = OwnTable(one, "one", targets), OwnTable(other, "other", targets)
    no_rows = cast("Any", None)

    merges(no_rows, 0)
    catalog.places["main.db.t"] = ELSEWHERE  # that batch has made it
    with pytest.raises(ConfigError, match=rf"queries 'one' and 'other' write to '{ELSEWHERE}'") as refused:
        too(no_rows, 0)

    assert refused.value.target == ELSEWHERE
    assert (one.batches, other.batches) == ([0], [])
    looks = list(catalog.looks)
    with pytest.raises(ConfigError):
        merges(no_rows, 1)
    assert catalog.looks == looks == ["main.db.t", ELSEWHERE, "main.db.t", "main.db.t"]


def test_a_catalog_that_does_not_answer_stops_the_query_of_its_table_alone() -> None:
    catalog = Catalog(b="/lake/b")
    targets = Targets(catalog.place)
    for query in ("away.db.a", "b"):
        targets.expect_own(query, TableRef(query))
    catalog.away = "away.db.a"
    sink = Sink()

    OwnTable(sink, "b", targets)(cast("Any", None), 0)

    assert sink.batches == [0]
    assert catalog.looks[-1] == "away.db.a"
    with pytest.raises(MergeFailedError):
        targets.expect_own("away.db.a", TableRef("away.db.a"))


def test_queries_with_tables_of_their_own_go_on() -> None:
    catalog = Catalog(a="/lake/a")
    targets = Targets(catalog.place)
    for query in ("a", "b"):
        targets.expect_own(query, TableRef(query))
    sink = Sink()

    OwnTable(sink, "a", targets)(cast("Any", None), 0)
    catalog.places["b"] = "/lake/b"
    for number in (1, 2):
        OwnTable(sink, "b", targets)(cast("Any", None), number)

    assert sink.batches == [0, 1, 2]
    assert catalog.looks == ["a", "b", "b", "b"]
