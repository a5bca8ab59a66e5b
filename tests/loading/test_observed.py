"""Writes that are watched: every element counts once, whatever the view through which it was written."""

import torch
from torch import nn

from streamload.loading.observed import Observed, Observer, tell_watchers, watching


def test_elements_count_once_through_any_view():
    first, second = nn.Parameter(torch.zeros(6, 4)), torch.zeros(3)
    observed = Observed({"first": first, "second": second})
    with Observer(observed):
        for write, count in (
            (lambda: first.data[0:2].copy_(torch.ones(2, 4)), 8),
            (lambda: first.data[1:3].copy_(torch.ones(2, 4)), 12),
            (lambda: first.data[:, 1:2].copy_(torch.ones(6, 1)), 15),
            (lambda: first.data.t()[3].fill_(2), 18),
            (lambda: first.data.view(-1)[23].fill_(7), 18),
            (lambda: first.data.view(-1)[22].fill_(7), 19),
            (lambda: first.data[3:, :2].add_(1), 22),
            (lambda: first.data.t().copy_(torch.ones(4, 6)), 24),
            (lambda: torch._foreach_copy_([second], [torch.ones(3)]), 24),
        ):
            write()
            assert observed.elements("first") == count
        assert observed.elements("second") == 3
        torch.empty(3).copy_(second)  # elsewhere
        second.sum()
    assert observed.writes("second") == 1
    second.fill_(0)
    assert observed.writes("second") == 1
    assert set(observed.touched()) == {"first", "second"}


def test_a_parameter_that_is_permuted_or_cut_out_of_another():
    base = torch.zeros(4, 6)
    permuted, cut = torch.zeros(3, 5).t(), base[:, 1:3]
    observed = Observed({"permuted": permuted, "cut": cut})
    with Observer(observed):
        permuted[:2].fill_(1)
        assert observed.elements("permuted") == 6
        permuted.copy_(torch.ones(5, 3))
        cut[3:].fill_(1)
        assert observed.elements("cut") == 2
        cut.fill_(1)
    assert (observed.elements("permuted"), observed.elements("cut")) == (15, 8)


def test_a_load_inside_tells_what_it_has_filled():
    tensor = torch.zeros(4)
    observed = Observed({"t": tensor})
    tell_watchers([tensor])
    assert observed.elements("t") == 0
    with watching(observed):
        tell_watchers([tensor])
    assert observed.elements("t") == 4
