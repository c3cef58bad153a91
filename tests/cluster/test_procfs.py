"""/proc is read right: odd names, orphans, CPU time."""

from eldr.cluster.procfs import ProcessStat, cpu_seconds, parse_stat, read_processes, tree


def stat(pid, parent, group, exited=False, ticks=0):
    return ProcessStat(pid, parent, group, exited, ticks)


def test_a_name_with_spaces_and_parentheses_does_not_shift_the_fields():
    line = "42 (VLLM: a) (b) ) S 7 40 40 0 -1 4194304 1 2 3 4 100 20 3 1 20 0 1 0 99 0"
    assert parse_stat(line) == ProcessStat(42, 7, 40, False, 124)


def test_a_zombie_counts_as_exited():
    assert parse_stat("42 (x) Z 7 40 40 0 -1 0 0 0 0 0 0 0 0 0 20").exited


def test_the_tree_holds_the_group_its_orphans_and_descendants_in_other_groups():
    processes = {
        p.pid: p
        for p in (
            stat(1, 0, 1),
            stat(10, 1, 10),
            stat(11, 10, 10),
            stat(12, 1, 10),
            stat(13, 11, 13),
            stat(14, 13, 13),
            stat(15, 10, 10, exited=True),
            stat(20, 1, 20),
        )
    }
    assert [member.pid for member in tree(10, processes)] == [10, 11, 12, 13, 14]


def test_another_process_with_the_pid_of_a_gone_root_is_not_its_tree():
    processes = {1: stat(1, 0, 1), 10: stat(10, 1, 1)}
    assert tree(10, processes) == []


def test_cpu_time_grows_with_work():
    import os

    group = read_processes()[os.getpid()].group
    before = cpu_seconds([group])[group]
    target = os.times().user + 0.1
    while os.times().user < target:
        sum(range(10_000))
    assert cpu_seconds([group])[group] >= before + 0.05
