/* Races between streams, with vector clocks: every stream counts what is queued on it, and knows how
 * far of the others it has waited. Two accesses to the same bytes, one of them writing, are a race
 * if neither stream has waited for the other. The host's threads count as one. */
#include "standin.h"

#include <string.h>

enum { HISTORY = 4096 };

static struct access {
    uint64_t address, time;
    size_t bytes;
    bool write;
    int slot;
    const char *what;
} history[HISTORY];
static int known;
static uint64_t times[MAX_SLOTS];
static int slots;
static clock_vector host;

/* The last slot is shared by all streams beyond it: between those no race is seen. */
int race_slot(void) { return slots < MAX_SLOTS - 1 ? slots++ : MAX_SLOTS - 1; }

void race_join(clock_vector *target, const clock_vector *source)
{
    for (int k = 0; k < slots || k == MAX_SLOTS - 1; k++)
        if (target->at[k] < source->at[k]) target->at[k] = source->at[k];
}

void race_host_saw(const clock_vector *clock)
{
    race_join(&host, clock);
    int kept = 0; /* what the host has waited for is before all that it queues from now on */
    for (int k = 0; k < known; k++)
        if (history[k].time > host.at[history[k].slot]) history[kept++] = history[k];
    known = kept;
}

static bool is_race(const struct access *before, const struct span *now, const struct stream *stream)
{
    bool overlaps = before->address < now->address + now->bytes &&
                    now->address < before->address + before->bytes;
    return overlaps && (before->write || now->write) && before->slot != stream->slot &&
           stream->clock.at[before->slot] < before->time;
}

void race_access(struct stream *stream, const char *what, const struct span *spans, int count)
{
    race_join(&stream->clock, &host);
    uint64_t time = stream->clock.at[stream->slot] = ++times[stream->slot];
    for (int s = 0; s < count; s++) {
        for (int k = 0; k < known; k++)
            if (is_race(&history[k], &spans[s], stream)) {
                finding("race", "%s %s %zu bytes that %s %s on another stream, unawaited", what,
                        spans[s].write ? "writes" : "reads", spans[s].bytes, history[k].what,
                        history[k].write ? "writes" : "reads");
                break;
            }
        if (known == HISTORY) /* the oldest are forgotten */
            memmove(history, history + 1, sizeof *history * (size_t)--known);
        history[known++] = (struct access){spans[s].address, time, spans[s].bytes, spans[s].write,
                                           stream->slot, what};
    }
}

void race_reset(void)
{
    memset(times, 0, sizeof times);
    memset(&host, 0, sizeof host);
    known = 0;
}
