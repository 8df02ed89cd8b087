/* The part of a fake libcuda.so.1 that is not in the fake cupy: which allocation an address is in.
 * Device memory is a mapping of a memfd named "fakecuda<device>:<bytes>". */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1 };

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t ptr)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[4096];
    int result = INVALID_VALUE;
    while (maps && result && fgets(line, sizeof line, maps)) {
        uint64_t start, end, bytes;
        const char *name = strstr(line, "/memfd:fakecuda");
        if (!name || sscanf(line, "%" SCNx64 "-%" SCNx64, &start, &end) != 2)
            continue;
        if (sscanf(name, "/memfd:fakecuda%*u:%" SCNu64, &bytes) != 1)
            continue;
        if (start <= ptr && ptr < start + bytes) {
            if (base) *base = start;
            if (size) *size = bytes;
            result = SUCCESS;
        }
    }
    if (maps) fclose(maps);
    return result;
}
