from spec_decode.conformance import Check, parametrize_with_checks


@parametrize_with_checks("window_pages")
def test_conformance(check: Check) -> None:
    check()
