/* Checks when a wait may poll, and what polling costs, without a server and without timing. */
#include "../shmserve.c"

#define CHECK(condition) \
    if (!(condition)) return fprintf(stderr, "line %d: %s\n", __LINE__, #condition), 1

int main(void) {
    static shmserve_client client;
    static shmserve_lane lane;
    int ends[2];
    size_t size;
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
    client.look_ns = 400000, client.look_limit = 1;
    lane.client = &client, lane.fd = ends[0];
    Look *look = &lane.look;
    int64_t now = 1000 * SECOND;

    CHECK(!may_look(&lane, now)); /* the last wait was long, or there was none */
    look->is_short = true;
    CHECK(may_look(&lane, now) && atomic_load(&client.looking) == 1);
    CHECK(look->account_ns == SAVED_NS);
    CHECK(!may_look(&lane, now)); /* another thread looks */
    atomic_store(&client.looking, 0);
    look->resume_at = now + 1;
    CHECK(!may_look(&lane, now)); /* the processor was away */
    look->resume_at = 0, look->account_ns = -MS;
    CHECK(!may_look(&lane, now) && !may_look(&lane, now + 99 * MS)); /* 1 % of the time is saved */
    CHECK(may_look(&lane, now + 101 * MS));
    client.look_ns = 0;
    CHECK(!may_look(&lane, now + 200 * MS));

    /* in vain: the time is taken from the account, and the turn is given up */
    look->account_ns = 0, look->quick = 9;
    int64_t began = now_ns();
    CHECK(look_for_packet(&lane, began, began, &size) == TIMEOUT);
    CHECK(look->account_ns < 0 && atomic_load(&client.looking) == 0);
    look->quick = INT_MAX; /* does not overflow */
    began = now_ns();
    CHECK(look_for_packet(&lane, began, began, &size) == TIMEOUT && look->quick == INT_MAX);
    /* with a packet: free for a thread with several quick waits in a row, and earns something */
    CHECK(send(ends[1], "abc", 3, 0) == 3);
    look->account_ns = 0;
    began = now_ns() - 1000;
    CHECK(look_for_packet(&lane, began, now_ns() + SECOND, &size) == DONE && size == 3 && !memcmp(lane.packet, "abc", 3));
    CHECK(look->account_ns > 0);
    /* a long time between two polls: no looks for a while, and twice as long the next time */
    look->pause_ns = look->resume_at = 0;
    for (int round = 1; round < 3; round++) {
        now = now_ns();
        CHECK(look_for_packet(&lane, now - SECOND, now + SECOND, &size) == TIMEOUT);
        CHECK(look->resume_at >= now + round * PAUSE_LOOKS_NS && look->pause_ns == round * 2 * PAUSE_LOOKS_NS);
    }
    /* a wait that slept: short or not */
    client.look_ns = SECOND, look->is_short = false;
    CHECK(send(ends[1], "abc", 3, 0) == 3 && receive(&lane, now_ns() + SECOND, &size) == DONE && look->is_short);
    client.look_ns = 1;
    CHECK(receive(&lane, now_ns() + 2 * MS, &size) == TIMEOUT && !look->is_short && !look->quick);
    close(ends[1]);
    CHECK(receive(&lane, now_ns() + SECOND, &size) == GONE);
    close(ends[0]);
    return 0;
}
