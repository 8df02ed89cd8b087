/* Which devices there are, what they say of themselves, and which of them reach each other.
 * The settings are those of tests/fake_cuda/fake_devices.py, and mean the same. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct devices devices;

/* Figures of NVIDIA's data sheets and CUDA's table of compute capabilities; bytes. */
struct model {
    const char *setting, *name;
    size_t memory, shared_per_sm, shared_optin, l2;
    int major, minor, multiprocessors, threads_per_sm, blocks_per_sm, bus_bits;
};

#define GB (1ull << 30)
#define KB 1024ull
static const struct model MODELS[] = {
    {"", "Fake GPU", 4 * GB, 228 * KB, 227 * KB, 50 << 20, 9, 0, 132, 2048, 32, 5120},
    {"h100", "NVIDIA H100 80GB HBM3", 80 * GB, 228 * KB, 227 * KB, 50 << 20, 9, 0, 132, 2048, 32, 5120},
    {"h200", "NVIDIA H200", 141 * GB, 228 * KB, 227 * KB, 50 << 20, 9, 0, 132, 2048, 32, 6144},
    {"b300", "NVIDIA B300", 270 * GB, 228 * KB, 227 * KB, 126 << 20, 10, 3, 148, 2048, 32, 8192},
    {"l4", "NVIDIA L4", 24 * GB, 100 * KB, 99 * KB, 48 << 20, 8, 9, 58, 1536, 24, 192},
    {"mig", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * GB, 228 * KB, 227 * KB, 6 << 20, 9, 0, 16, 2048, 32, 640},
};

static const struct model *model(void)
{
    const char *wanted = setting("MODEL", "");
    for (size_t k = 1; k < sizeof MODELS / sizeof *MODELS; k++)
        if (!strcmp(wanted, MODELS[k].setting)) return &MODELS[k];
    return &MODELS[0];
}

bool has_driver(void) { return strcmp(setting("DEVICES", "2"), "none") != 0; }

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < devices.count; }

size_t device_bytes(void)
{
    const char *told = setting("MEMORY", "");
    return *told ? strtoull(told, NULL, 10) : model()->memory;
}

/* The k-th device that is visible; false: there are fewer. */
PUBLIC bool standin_device(int k, int *index, int *part)
{
    if (!devices.count) read_devices();
    if (!is_device(k)) return false;
    *index = devices.at[k].index;
    *part = devices.at[k].part;
    return true;
}

bool pins_read_only(void) { return strcmp(setting("PIN", "readonly"), "writable") != 0; }

bool can_access_peer(int device, int peer)
{
    return device != peer && strcmp(setting("PEERS", "1"), "0") != 0;
}

bool reaches(int device, int owner)
{
    return device == owner || devices.at[device].peers[owner];
}

/* ------------------------------------------------------------------------------- visible devices */

static bool is_divided(int index)
{
    char list[64], *rest = list;
    snprintf(list, sizeof list, "%s", setting("MIG", ""));
    for (char *one; (one = strsep(&rest, ","));)
        if (*one && atoi(one) == index) return true;
    return false;
}

static struct device physical(int index, int part)
{
    struct device made = {.index = index, .part = part};
    memset(made.uuid, 0x11, sizeof made.uuid); /* no byte is 0: CuPy tells what is before one */
    memcpy(made.uuid, "\xFA\x4E\xC0\xDA", 4);
    made.uuid[14] = (unsigned char)(index + 1);
    made.uuid[15] = (unsigned char)(part + 1);
    return made;
}

static void name_of(const struct device *device, char *name, size_t bytes)
{
    const unsigned char *u = device->uuid;
    snprintf(name, bytes, "%s-%02x%02x%02x%02x-1111-1111-1111-11111111%02x%02x",
             device->part ? "MIG" : "GPU", u[0], u[1], u[2], u[3], u[14], u[15]);
}

/* What a word of CUDA_VISIBLE_DEVICES names, of `count` devices; false: nothing. */
static bool named(const char *word, int count, struct device *found)
{
    char *end, name[64];
    long number = strtol(word, &end, 10);
    if (*word && !*end) {
        *found = physical((int)number, 0);
        return number >= 0 && number < count;
    }
    if (strncmp(word, "GPU-", 4) && strncmp(word, "MIG-", 4)) return false;
    for (int k = 0; k < count; k++)
        for (int part = 0; part <= (is_divided(k) ? 2 : 0); part++) {
            *found = physical(k, part);
            name_of(found, name, sizeof name);
            if (!strncmp(name, word, strlen(word))) return true;
        }
    return false;
}

static const char *kind_of(const char *word)
{
    return strncmp(word, "GPU-", 4) ? strncmp(word, "MIG-", 4) ? "" : "MIG" : "GPU";
}

/* CUDA_VISIBLE_DEVICES up to the first word that names none or is of another kind; nothing if one
 * is named twice. */
static int chosen_devices(struct device *chosen, int all)
{
    const char *told = getenv("CUDA_VISIBLE_DEVICES");
    char words[512], *rest = words, *first = NULL;
    int count = 0;
    if (!told) {
        for (; count < all; count++) chosen[count] = physical(count, 0);
        return count;
    }
    snprintf(words, sizeof words, "%s", told);
    for (char *word; count < MAX_DEVICES && (word = strsep(&rest, ","));) {
        struct device found;
        word += strspn(word, " ");
        word[strcspn(word, " ")] = 0;
        if (!first) first = word;
        if (!named(word, all, &found) || strcmp(kind_of(word), kind_of(first))) break;
        for (int k = 0; k < count; k++)
            if (!memcmp(chosen[k].uuid, found.uuid, 16)) return 0;
        chosen[count++] = found;
    }
    return count;
}

void read_devices(void)
{
    struct device chosen[MAX_DEVICES];
    int all = has_driver() ? atoi(setting("DEVICES", "2")) : 0;
    if (all > MAX_DEVICES) all = MAX_DEVICES;
    int count = chosen_devices(chosen, all);
    memset(&devices, 0, sizeof devices);
    for (int k = 0; k < count; k++) {
        bool divided = !chosen[k].part && is_divided(chosen[k].index);
        if (chosen[k].part || divided) { /* CUDA shows one MIG device, and nothing beside */
            devices.at[0] = divided ? physical(chosen[k].index, 1) : chosen[k];
            devices.count = 1;
            return;
        }
    }
    memcpy(devices.at, chosen, sizeof *chosen * (size_t)count);
    devices.count = count;
}

/* ------------------------------------------------------------------------------------- properties */

/* The size of a value is its field's. */
static void put(unsigned char *at, size_t offset, const void *value, size_t bytes)
{
    memcpy(at + offset, value, bytes);
}

#define PUT(type, offset12, offset13, ...)                                     \
    do {                                                                       \
        type value = __VA_ARGS__;                                              \
        put(properties, version == 12 ? offset12 : offset13, &value, sizeof value); \
    } while (0)

/* cudaDeviceProp: offsets of CUDA 12.9's header and of 13.0's, which lacks some fields. */
static int get_properties(unsigned char *properties, int ordinal, int version)
{
    if (!is_device(ordinal)) return INVALID_DEVICE;
    const struct model *is = model();
    const struct device *device = &devices.at[ordinal];
    memset(properties, 0, version == 12 ? 1032 : 1008);
    snprintf((char *)properties, 256, "%s", is->name);
    put(properties, 256, device->uuid, 16);
    PUT(size_t, 288, 288, device_bytes());
    PUT(size_t, 296, 296, 48 * KB);
    PUT(int, 304, 304, 65536);
    PUT(int, 308, 308, 32);
    PUT(size_t, 312, 312, INT32_MAX);
    PUT(int, 320, 320, 1024);
    const int block[3] = {1024, 1024, 64}, grid[3] = {INT32_MAX, 65535, 65535};
    put(properties, 324, block, sizeof block);
    put(properties, 336, grid, sizeof grid);
    PUT(size_t, 352, 352, 64 * KB);
    PUT(int, 360, 360, is->major);
    PUT(int, 364, 364, is->minor);
    PUT(size_t, 368, 368, 512);
    PUT(int, 388, 384, is->multiprocessors);
    PUT(int, 400, 392, 1);
    PUT(int, 576, 560, 1);
    PUT(int, 580, 564, 1);
    PUT(int, 584, 568, device->index + 1);
    PUT(int, 600, 584, 3);
    PUT(int, 604, 588, 1);
    PUT(int, 612, 592, is->bus_bits);
    PUT(int, 616, 596, (int)is->l2);
    PUT(int, 624, 604, is->threads_per_sm);
    PUT(int, 628, 608, 1);
    PUT(size_t, 640, 624, is->shared_per_sm);
    PUT(int, 648, 632, 65536);
    PUT(size_t, 696, 672, is->shared_optin);
    PUT(int, 712, 688, is->blocks_per_sm);
    PUT(int, 736, 712, pins_read_only());
    return OK;
}

QUERY(cudaGetDeviceProperties_v2, (unsigned char *properties, int ordinal),
      get_properties(properties, ordinal, 12))
QUERY(cudaGetDeviceProperties, (unsigned char *properties, int ordinal),
      get_properties(properties, ordinal, 13))

PUBLIC int cudaDeviceGetAttribute(int *value, int attribute, int ordinal)
{
    BEGIN;
    if (!is_device(ordinal)) return finish(INVALID_DEVICE);
    if (attribute < 1 || attribute > 147) return finish(INVALID_VALUE);
    const struct model *is = model();
    const int known[148] = {
        [1] = 1024, [2] = 1024, [3] = 1024, [4] = 64, [5] = INT32_MAX, [6] = 65535, [7] = 65535,
        [8] = 48 << 10, [9] = 64 << 10, [10] = 32, [11] = INT32_MAX, [12] = 65536, [14] = 512,
        [15] = 1, [16] = is->multiprocessors, [19] = 1, [31] = 1, [32] = 1,
        [33] = devices.at[ordinal].index + 1, [37] = is->bus_bits, [38] = (int)is->l2,
        [39] = is->threads_per_sm, [40] = 3, [41] = 1, [75] = is->major, [76] = is->minor, [78] = 1,
        [79] = 1, [80] = 1, [81] = (int)is->shared_per_sm, [82] = 65536, [90] = 1, [91] = 1,
        [95] = 1, [97] = (int)is->shared_optin, [99] = 1, [106] = is->blocks_per_sm,
        [111] = 1024, [113] = pins_read_only(), [120] = is->major >= 9, [125] = 1,
    };
    *value = known[attribute];
    return finish(OK);
}
