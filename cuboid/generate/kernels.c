/* What takes the time of decoding steps on a CPU.
 *
 * Matmuls of rows with a weight that lies in panels: WIDTH outputs side by side, input after input, as they are read.
 * A library packs the weight anew for every matmul, which takes as long as multiplying eight rows by it. Here a block
 * of up to HEIGHT rows and WIDTH outputs stays in registers while its inputs go by once, and every sum is taken in the
 * order of the inputs, however many rows there are. */

#include <math.h>
#include <stdlib.h>

enum { WIDTH = 8, HALF = 4, HEIGHT = 8, AHEAD = 32 };

typedef float Vector __attribute__((vector_size(4 * HALF), aligned(4), may_alias));

#define EACH_ROW _Pragma("GCC unroll 8") for (int row = 0; row < rows; row++)

/* Inlined with `rows` known, so that the sums are registers. `x` is (inputs, rows), `panel` (inputs, WIDTH). */
static inline __attribute__((always_inline)) void block(int rows, const float *x, const float *panel, float *y,
                                                        long inputs, long outputs) {
    Vector low[HEIGHT], high[HEIGHT];
    EACH_ROW low[row] = high[row] = (Vector){0};
    for (long input = 0; input < inputs; input++, x += rows, panel += WIDTH) {
        __builtin_prefetch(panel + AHEAD * WIDTH);
        Vector first = *(const Vector *)panel, second = *(const Vector *)(panel + HALF);
        Vector of_rows[2] = {*(const Vector *)x, *(const Vector *)(x + (rows > HALF ? HALF : 0))};
        EACH_ROW {
            low[row] += first * of_rows[row / HALF][row % HALF];
            high[row] += second * of_rows[row / HALF][row % HALF];
        }
    }
    EACH_ROW {
        *(Vector *)(y + row * outputs) = low[row];
        *(Vector *)(y + row * outputs + HALF) = high[row];
    }
}

static int height(long rows) { return rows < HEIGHT ? (int)rows : HEIGHT; }

/* y (rows, outputs) of x (rows, inputs) and panels (outputs / WIDTH, inputs, WIDTH); not 0 when there is no memory. */
int matmul(const float *x, const float *panels, float *y, long rows, long inputs, long outputs, int threads) {
    /* Rows are read in whole vectors, the last ones from behind their end. */
    float *transposed = malloc(sizeof(float) * (rows * inputs + HALF));
    if (!transposed) return 1;
    for (long start = 0; start < rows; start += HEIGHT)
        for (int row = 0, count = height(rows - start); row < count; row++)
            for (long input = 0; input < inputs; input++)
                transposed[start * inputs + input * count + row] = x[(start + row) * inputs + input];
#pragma omp parallel for num_threads(threads)
    for (long output = 0; output < outputs; output += WIDTH)
        for (long start = 0; start < rows; start += HEIGHT) {
            const float *part = transposed + start * inputs, *panel = panels + output * inputs;
            float *to = y + start * outputs + output;
#define ROWS(count) case count: block(count, part, panel, to, inputs, outputs); break;
            switch (height(rows - start)) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
        }
    free(transposed);
    return 0;
}

/* y of x, both (rows, size): each row over its root mean square, times `weight`. Torch makes eight operations of it. */
void normalize(const float *x, const float *weight, float *y, long rows, long size, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 8 * HEIGHT)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * size;
        float *to = y + row * size, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long place = 0; place < size; place++) sum += from[place] * from[place];
        float scale = 1 / sqrtf(sum / size + epsilon);
#pragma omp simd
        for (long place = 0; place < size; place++) to[place] = from[place] * scale * weight[place];
    }
}
