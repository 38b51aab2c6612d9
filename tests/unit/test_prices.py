"""Prices: our table, SkyPilot's tables, and what both refuse."""

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.core.errors import InputError
from hotloop.plan.cards import card_named, cards
from hotloop.plan.prices import Offer, cheapest_of_kinds, kept_file, packaged_offers, parse_offers, read_offers, written
from hotloop.plan.skypilot import read_table

COLUMNS = "provider,instance,region,zone,card,gpus,cpus,memory_gib,on_demand,spot,date,source"
WORDS = st.text(st.characters(exclude_categories=("C", "Z")), max_size=8)
PRICES = st.none() | st.floats(1e-3, 1e4)

OFFERS = st.builds(
    Offer,
    provider=WORDS,
    instance=WORDS.filter(bool),
    region=WORDS,
    zone=WORDS,
    card=st.sampled_from(sorted(cards())),
    gpus=st.integers(1, 16),
    cpus=st.just(0.0) | st.floats(0.5, 500),
    memory_gib=st.just(0.0) | st.floats(1, 4000),
    on_demand=PRICES,
    spot=PRICES,
    date=st.none() | st.dates(max_value=date(2026, 1, 2)),
    source=WORDS,
)


def offer(**changes: Any) -> Offer:
    one = Offer("aws", "p5", "us-east-1", "a", "H100", 8, 192.0, 2048.0, 98.0, 34.0, date(2026, 1, 2), "bill")
    return replace(one, **changes)


@settings(max_examples=30)
@given(st.lists(OFFERS, max_size=4))
def test_what_is_written_is_read_again(offers: list[Offer]) -> None:
    assert parse_offers(written(offers), "prices.csv") == offers


def test_the_packaged_prices_name_their_source_and_known_cards() -> None:
    offers = packaged_offers()
    assert {"aws", "azure", "gcp"} <= {one.provider for one in offers}
    assert all(one.source and (one.on_demand or one.spot) for one in offers)
    assert all(one.spot <= one.on_demand for one in offers if one.spot and one.on_demand)


def test_a_price_without_a_date_has_no_age() -> None:
    assert offer().age(date(2026, 1, 12)) == 10
    assert offer(date=None).age(date(2026, 1, 12)) is None


def test_absent_prices_stay_absent() -> None:
    [one] = parse_offers("instance,card,gpus\nmine,H100,8\n", "own.csv")
    assert (one.on_demand, one.spot, one.date, one.cpus) == (None, None, None, 0.0)
    assert parse_offers("instance,card,gpus\nmine,H100,8, ,\n", "own.csv") == [one], "commas alone say nothing"


def test_of_an_instance_the_cheapest_place_is_taken() -> None:
    dear, cheap, spot_only = offer(on_demand=99.0), offer(region="b", on_demand=90.0), offer(region="c", on_demand=None)
    assert cheapest_of_kinds([spot_only, dear, cheap]) == [cheap]
    assert cheapest_of_kinds([offer(spot=30.0), offer(zone="b", spot=20.0)])[0].spot == 20.0


def test_machines_of_one_name_with_other_gpus_are_others() -> None:
    machines = [offer(instance="lab", gpus=1), offer(instance="lab", gpus=8), offer(instance="lab", card="L4", gpus=1)]
    assert cheapest_of_kinds(machines) == machines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column card, gpus, instance"),
        ("a,b\n1,2\n", "no column card, gpus, instance"),
        (f"{COLUMNS}\na,i,r,z,H999,8,1,1,1,1,,s\n", "unknown card 'H999'"),
        (f"{COLUMNS}\na,i,r,z,H100,0,1,1,1,1,,s\n", "0 GPUs"),
        (f"{COLUMNS}\na,,r,z,H100,1,1,1,1,1,,s\n", "an instance without a name"),
        ("instance,card,gpus,spot,spot\ni,H100,1,1,2\n", "it has several columns spot"),
        (f"{COLUMNS}\na,i,r,z,H100,-1,1,1,1,1,,s\n", "-1 GPUs"),
        (f"{COLUMNS}\na,i,r,z,H100,some,1,1,1,1,,s\n", "some"),
        (f"{COLUMNS}\na,i,r,z,H100,8,1,1,-3,1,,s\n", "-3 is no price"),
        (f"{COLUMNS}\na,i,r,z,H100,8,1,1,nan,1,,s\n", "nan is no price"),
        (f"{COLUMNS}\na,i,r,z,H100,8,1,1,1,inf,,s\n", "inf is no price"),
        (f"{COLUMNS}\na,i,r,z,H100,8,1,1,$3,1,,s\n", "$3"),
        (f"{COLUMNS}\na,i,r,z,H100,8,1,1,1,1,yesterday,s\n", "yesterday"),
        (f"{COLUMNS}\na,i,r,z,H100,8,1,1,1,1,9999-01-01,s\n", "9999-01-01 is in the future"),
        (f"{COLUMNS}\na,i,r,z,H100\n", "''"),
        ("instance,card,gpus,on_demand\nlab,H100,8,12,50\n", "more values than columns: 50"),
        (f'{COLUMNS}\n"{"x" * 200_000}"\n', "field"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match=r"own\.csv") as refused:
        parse_offers(text, "own.csv")
    assert said in str(refused.value)


def test_the_line_that_is_wrong_is_named() -> None:
    good = "a,i,r,z,H100,8,1,1,1,1,,s\n"
    with pytest.raises(InputError, match=r"own\.csv, line 3"):
        parse_offers(f"{COLUMNS}\n{good}{good.replace('H100', 'H1')}{good}", "own.csv")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_what_is_no_text_or_no_file_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "own.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"own\.csv cannot be read"):
        read_offers(tmp_path / "own.csv")


def test_refreshed_prices_take_the_place_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = kept_file()
    assert file is not None
    file.parent.mkdir()
    file.write_text(written([offer()]))
    assert packaged_offers() == [offer()]
    file.write_text("damaged")
    with pytest.raises(InputError, match=r"prices\.csv is no table of prices") as damaged:
        packaged_offers()
    assert f"rm {file}" in damaged.value.fix, "a refresh reads it too, and cannot mend it"


def test_cards_are_found_by_key_and_by_the_drivers_name() -> None:
    assert card_named("h100") == card_named(card_named("H100").name)
    with pytest.raises(InputError, match="unknown card"):
        card_named("")
    with pytest.raises(InputError) as beginning:
        card_named("a100")
    assert beginning.value.fix.startswith("--card A100-"), "not another card with a similar name"


HEAD = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,AvailabilityZone\n"


def rows(text: str, provider: str = "aws") -> list[Offer]:
    return read_table(HEAD + text, provider, None, "vms.csv")


def test_a_table_of_whole_instances() -> None:
    [one] = rows("p5.48xlarge,H100,8.0,192.0,2048.0,98.3,34.2,us-east-1,use1-az1\nm5.large,,,2,8,0.1,,us-east-1,a\n")
    assert (one.provider, one.card, one.gpus, one.on_demand, one.spot) == ("aws", "H100", 8, 98.3, 34.2)
    assert (one.zone, one.cpus, one.memory_gib, one.date) == ("use1-az1", 192.0, 2048.0, None)


def test_shares_of_a_gpu_and_cards_that_are_not_known_are_left_out() -> None:
    assert rows("a,A10,0.33,12,110,0.9,,eastus,\nb,MI300X,8,96,1850,48,,eastus,\n", "azure") == []


def test_azures_cards_are_told_apart_and_counted_as_its_pages_do() -> None:
    text = (
        "Standard_NC40ads_H100_v5,H100,1,40,320,6.9,,westus3,\nStandard_ND96isr_H100_v5,H100,12,96,1900,98.3,,eastus,\n"
    )
    nvl, whole = rows(text, "azure")
    assert (nvl.card, nvl.gpus) == ("H100-NVL", 1)
    assert (whole.card, whole.gpus) == ("H100", 8)


def test_a_card_on_pcie_is_another_than_its_namesake() -> None:
    [one] = rows("gpu_1x_h100_pcie,H100,1,26,200,2.49,,us-east-1,\n", "lambda")
    assert one.card == "H100-PCIe"


GOOGLE = (
    "a3-highgpu-8g,,,208,1872,10.0,4.0,us-east4,us-east4-a\n"
    "a3-highgpu-1g,,,26,234,1.2,0.5,us-east4,us-east4-a\n"
    "g2-standard-4,,,4,16,0.2,0.1,us-east4,us-east4-a\n"
    "n1-standard-8,,,8,30,0.38,0.08,us-east4,us-east4-a\n"
)


def test_on_google_a_machine_and_its_gpus_are_added() -> None:
    found = rows(f"{GOOGLE},H100,8,,,78.0,30.0,us-east4,us-east4-a\n,T4,4,,,1.4,0.6,us-east4,us-east4-a\n", "gcp")
    named = {one.instance: one for one in found}
    assert set(named) == {"a3-highgpu-8g", "n1-standard-8+4xT4"}
    assert (named["a3-highgpu-8g"].on_demand, named["a3-highgpu-8g"].spot) == (88.0, 34.0)
    assert named["n1-standard-8+4xT4"].gpus == 4


def test_on_google_both_parts_are_of_the_same_zone() -> None:
    assert rows(f"{GOOGLE},L4,1,,,0.5,0.2,us-east4,us-east4-b\n", "gcp") == []


@pytest.mark.parametrize(("price", "spot"), [("30.0", "30.0"), ("20.0", "30.0"), ("", "30.0")])
def test_a_price_on_demand_that_is_no_higher_than_spot_is_absent(price: str, spot: str) -> None:
    [one] = rows(f"{GOOGLE},H100,8,,,{price},{spot},us-east4,us-east4-a\n", "gcp")
    assert (one.on_demand, one.spot) == (None, 34.0)


def test_processors_and_prices_that_a_table_does_not_tell_are_absent() -> None:
    head, machine = HEAD.replace(",vCPUs", ""), "a3-highgpu-8g,,,1872,10,4,us-east4,a\n"
    [one] = read_table(f"{head}{machine},H100,8,,78.0,0,us-east4,a\n", "gcp", None, "vms.csv")
    assert (one.cpus, one.memory_gib, one.on_demand, one.spot) == (0.0, 1872.0, 88.0, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("InstanceType,Price\n", "no table of SkyPilot's catalog"),
        (HEAD + "p5,H100,8,192,2048,free,,us-east-1,a\n", "cannot be read"),
        (HEAD + "p5,H100,many,192,2048,1,,us-east-1,a\n", "cannot be read"),
        (HEAD + "p5,H100,8,192,2048,-1,,us-east-1,a\n", "cannot be read"),
        (HEAD + "p5,H100,8,192,2048,nan,,us-east-1,a\n", "cannot be read"),
        (HEAD + "p5,H100,inf,192,2048,1,,us-east-1,a\n", "cannot be read"),
        (HEAD + "p5,H100\n", "cannot be read"),
        (HEAD + f"{'x' * 200_000},H100,8,1,1,1,1,r,z\n", "cannot be read"),
    ],
)
def test_a_table_of_skypilots_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_table(text, "gcp", None, "vms.csv")
